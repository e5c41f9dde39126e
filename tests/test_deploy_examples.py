"""The examples of deployment run as a user would run them: PyTorch to numpy, a training step of JAX, a speech model
behind HTTP, a Keras model. Their packages are in the extra `test`."""
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pytorch_to_a_process_with_numpy_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("deploy_numpy").main(str(tmp_path)) == 0
    assert capsys.readouterr().out.count("differs from PyTorch by") == 3


def test_a_training_step_of_jax(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("jax_training_step").main(["--steps", "12"]) == 0
    assert "loss" in capsys.readouterr().out


def test_a_speech_model_of_a_wheel_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    speech = example("serve_speech")
    assert speech.main([]) == 0
    said = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert max(said[:3]) < 0.2 < 0.5 < max(said[4:6]) and said[-1] < 0.2  # noise, a voice, noise


def test_the_speech_model_gives_what_onnxruntime_gives() -> None:
    import onnxruntime

    from anyshape.tools.serve.onnx_model import served_onnx
    speech = example("serve_speech")
    sound = speech.made_sound(0.2)
    session = onnxruntime.InferenceSession(str(speech.model_path()), providers=["CPUExecutionProvider"])
    served = served_onnx("vad", str(speech.model_path()), 1)
    names = [one.name for one in served.inputs]
    found = speech.likelihoods(lambda **given: served.run([given[name] for name in names]), sound)
    wanted = speech.likelihoods(lambda **given: session.run(None, given), sound)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.full  # importing Keras takes seconds
def test_a_keras_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert example("keras_model").main() == 0
    assert capsys.readouterr().out.count("differs from Keras by") == 3
