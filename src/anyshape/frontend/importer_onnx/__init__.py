"""The importer of ONNX models: nodes of a model become a graph of the IR, a translation per operator."""
