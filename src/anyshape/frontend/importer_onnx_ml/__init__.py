"""Translations of ONNX's operators of classical machine learning (ai.onnx.ml); importing it fills the table of rows."""
from anyshape.frontend.importer_onnx_ml import classical, trees

__all__ = ["classical", "trees"]
