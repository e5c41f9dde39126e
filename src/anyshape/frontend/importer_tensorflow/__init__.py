"""TensorFlow's models, by way of StableHLO: `anyshape.compile_tensorflow`."""
import sys

if "tensorflow" in sys.modules and "triton" not in sys.modules:
    # both carry an LLVM whose symbols meet: triton, which PyTorch imports where it is installed, ends a process that
    # has loaded TensorFlow. PyTorch goes without it then; the other way round they stand each other.
    sys.modules["triton"] = None  # type: ignore[assignment]
