"""Stages as ONNX models, for engines that are not PyTorch."""
