"""The process in which TensorFlow's converter runs, which ends its process where it meets what it does not expect.

    python convert_process.py pywrap_tensorflow_to_stablehlo.so SAVED_MODEL SIGNATURE TAG OUTPUT

Only the converter's library is loaded, not TensorFlow: it takes a fraction of a second. The output is the module, or
OUTPUT.error with what the converter says.
"""
import importlib.util
import sys
from pathlib import Path


def main(library: str, folder: str, signature: str, tag: str, output: str) -> int:
    """Converts; 1 where the converter refuses."""
    spec = importlib.util.spec_from_file_location(Path(library).name.split(".")[0], library)
    assert spec is not None and spec.loader is not None
    converter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(converter)
    try:
        made = converter.savedmodel_to_stablehlo(folder, [signature], [tag], "")
    except ValueError as error:
        Path(f"{output}.error").write_text(str(error), encoding="utf-8", errors="replace")
        return 1
    Path(output).write_bytes(made)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
