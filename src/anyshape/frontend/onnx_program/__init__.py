"""Programs of ONNX models: stages, each a compiled program or a step of the host, behind one callable."""
from anyshape.frontend.onnx_program.callable import OnnxCallable, compile_model

__all__ = ["OnnxCallable", "compile_model"]
