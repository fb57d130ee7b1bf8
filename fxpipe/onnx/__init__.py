"""One graph of ATen calls as an ONNX model: decomposed, converted, written, checked."""
