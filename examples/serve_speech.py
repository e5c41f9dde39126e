"""A speech model of a PyPI wheel behind HTTP, called by a client of Python's own library.

    pip install 'anyshape[onnx,serve]' silero-vad
    python examples/serve_speech.py                    # or: --wav FILE, 16,000 samples a second, one channel of 16 bits

The model says how likely speech is in each 32 ms of sound. It keeps a state between pieces, which the client sends
along, so that the server needs to know nothing of it. Without a file, the sound is made: noise, a voice, noise.
"""
from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RATE, PIECE, BEFORE = 16_000, 512, 64  # samples: a second, of a piece, and those before it that the model sees too


def model_path() -> Path:
    """The ONNX file in the package silero_vad, which is not imported: it would bring torch."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or spec.origin is None:
        raise SystemExit("the package silero_vad is not installed: pip install silero-vad")
    return Path(spec.origin).parent / "data" / "silero_vad_16k_op15.onnx"


def made_sound(seconds: float = 1.0, seed: int = 0) -> Any:
    """f32[samples]: noise, a voice (harmonics of a falling pitch, through two formants, in syllables), noise."""
    draw = np.random.default_rng(seed)
    count = int(seconds * RATE)
    time = np.arange(count) / RATE
    pitch = 130 - 20 * time
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voice = sum(np.sin(k * phase) * sum(np.exp(-((k * 130 - at) / 150) ** 2) for at in (700, 1200, 2600))
                for k in range(1, 30))
    voice = voice * (0.6 + 0.4 * np.sin(2 * np.pi * 4 * time)) * 0.1
    quiet = draw.normal(size=count) * 1e-3
    return np.concatenate([quiet, voice + quiet, quiet]).astype(np.float32)


def read_sound(path: str) -> Any:
    """f32[samples] of a wave file."""
    with wave.open(path) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{path} is not one channel of 16 bits at {RATE} samples a second")
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


class Client:
    """Tensors as bytes behind JSON, by the Open Inference Protocol."""

    def __init__(self, address: str, model: str) -> None:
        self.connection = http.client.HTTPConnection(address, timeout=60)
        self.path = f"/v2/models/{model}/infer"

    def __call__(self, **arrays: Any) -> list[Any]:
        words = {"f": "FP32", "i": "INT64"}
        inputs = [{"name": name, "datatype": words[array.dtype.kind], "shape": list(array.shape),
                   "parameters": {"binary_data_size": array.nbytes}} for name, array in arrays.items()]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        self.connection.request("POST", self.path, head + b"".join(one.tobytes() for one in arrays.values()),
                                {"Inference-Header-Content-Length": str(len(head))})
        answer = self.connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(json.loads(body)["error"])
        at = int(answer.headers["Inference-Header-Content-Length"])
        found = []
        for one in json.loads(body[:at])["outputs"]:
            size = one["parameters"]["binary_data_size"]
            found.append(np.frombuffer(body[at:at + size], np.float32).reshape(one["shape"]))
            at += size
        return found


def pieces(sound: Any) -> Iterator[Any]:
    """f32[1, BEFORE + PIECE] for each whole piece."""
    padded = np.concatenate([np.zeros(BEFORE, np.float32), sound])
    for at in range(0, len(sound) - PIECE + 1, PIECE):
        yield padded[None, at:at + BEFORE + PIECE]


def likelihoods(call: Any, sound: Any) -> list[float]:
    """How likely speech is in each piece. call: the model, by named arrays."""
    state, found = np.zeros((2, 1, 128), np.float32), []
    for piece in pieces(sound):
        likely, state = call(input=piece, state=state, sr=np.array(RATE))
        found.append(float(likely.ravel()[0]))
    return found


def main(words: list[str] | None = None) -> int:
    """Starts a server, sends the sound, prints a line for each quarter of a second, and ends the server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wav", default="", help="a file to listen to (default: a sound that is made)")
    given = parser.parse_args(words)
    sound = read_sound(given.wav) if given.wav else made_sound()
    command = [sys.executable, "-m", "anyshape", "serve", f"vad={model_path()}", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()              # vad: http://127.0.0.1:40123/v2/models/vad/infer (...)
        if not line:
            return 1
        found = likelihoods(Client(line.split("//")[1].split("/")[0], "vad"), sound)
    finally:
        server.terminate()
        server.wait(60)
    for at in range(0, len(found), 8):
        mean = sum(found[at:at + 8]) / len(found[at:at + 8])
        print(f"{at * PIECE / RATE:5.2f} s  {mean:4.2f}  {'#' * round(40 * mean)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
