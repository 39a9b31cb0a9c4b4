"""Models as ONNX files: the memory by ONNX's own operators, and whole models with their state going in and out."""
