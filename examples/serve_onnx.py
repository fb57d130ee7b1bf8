"""Serve a model without PyTorch: the stages that `fxpipe export --inference` writes, one after the other.

From the repository's root:

    fxpipe compile examples/gpt.py -n 2 -o build/
    fxpipe export build/ --inference --untrained -o onnx/
    python examples/serve_onnx.py onnx/

What a run has trained is exported with --trained out/model.safetensors, and would differ from the new model here.
Without a folder it exports examples/gpt.py, cut for two workers, itself. PyTorch only makes what to compare with.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime


class Chain:
    """The stages in a folder: the outputs of each are the inputs of the next, in the same order."""

    def __init__(self, folder):
        count = len(list(Path(folder).glob("stage_*.inference.onnx")))
        files = [Path(folder, f"stage_{k}.inference.onnx") for k in range(count)]
        self.sessions = [onnxruntime.InferenceSession(f, providers=["CPUExecutionProvider"]) for f in files]

    def __call__(self, *values):
        for session in self.sessions:
            names = [i.name for i in session.get_inputs()]
            values = session.run(None, dict(zip(names, values, strict=True)))
        return values


def main(folder=None):
    import gpt
    import torch

    torch.manual_seed(0)  # as `fxpipe compile` and `fxpipe export` do
    model = gpt.model()
    with tempfile.TemporaryDirectory() as temporary:
        chain = Chain(folder or export(model, gpt.loss, next(iter(gpt.train_data())), Path(temporary)))
    text = np.random.default_rng(0).integers(0, gpt.VOCABULARY, (3, gpt.CONTEXT))  # any number of samples
    (logits,) = chain(text)
    difference = np.abs(logits - model.eval()(torch.from_numpy(text)).detach().numpy()).max()
    print(f"{len(chain.sessions)} stages, logits {list(logits.shape)}: {difference:.1e} from the model's own")
    return 0 if difference <= 1e-4 else 1


def export(model, loss, batch, folder):
    import fxpipe
    from fxpipe.export.inference import export_inference

    build = fxpipe.compile(model, loss, batch, workers=2, cost="analytic")
    export_inference(model, loss, batch, folder, plan=build.plan)
    return folder


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
