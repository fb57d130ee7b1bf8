"""The driver: capture, passes, plan, emitted code, build; and the comparison with eager PyTorch."""
