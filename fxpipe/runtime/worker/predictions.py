"""One worker's live weights, predicted some updates ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fxpipe.policy.optimizers.predict import Predictor
from fxpipe.runtime.wires.transport import Transport


class Predictions:
    """Predictions from the live version, each computed once; later predictions reuse their memory.

    Args:
        predictor: None if the policy does not predict, or the worker trains nothing.
        trained: the live weights by name.

    Attributes:
        made: the predictions, by distance and name.
    """

    def __init__(self, predictor: Predictor | None, trained: Mapping[str, nn.Parameter], transport: Transport) -> None:
        self.made: dict[int, dict[str, Tensor]] = {}
        self._predictor = predictor
        self._trained = trained
        self._transport = transport
        self._index = {name: i for i, name in enumerate(trained)}

    def look(self, names: Sequence[str], ahead: int) -> Mapping[str, Tensor]:
        """The live weights, predicted `ahead` updates ahead."""
        if ahead == 0 or self._predictor is None:
            return self._trained
        found = self.made.setdefault(ahead, {})
        missing = [name for name in names if name not in found]
        if missing:
            watch = self._transport.watch
            watch.open("predict")
            values = self._predictor.predict(ahead, [self._index[name] for name in missing])
            found.update(zip(missing, values, strict=True))
            watch.close()
        return found

    def keep(self, names: Sequence[str], ahead: int) -> dict[str, Tensor]:
        """The same, to outlive the live version: predictions as they are, copies of what is not predicted."""
        found = self.look(names, ahead)
        predicted = self.made.get(ahead, {})
        kept: dict[str, Tensor] = {}
        for name in names:
            live = found[name] is self._trained[name]  # also if there is nothing yet to predict from
            kept[name] = found[name].detach().clone() if live else predicted.pop(name)
        return kept

    def forget(self, ahead: int) -> None:
        """Free a prediction that nothing reads any more."""
        self.give_back(self.made.pop(ahead, {}))

    def forget_all(self) -> None:
        """Free all predictions: the live weights are about to change, or have changed."""
        for ahead in list(self.made):
            self.forget(ahead)

    def give_back(self, predicted: Mapping[str, Tensor]) -> None:
        """Take back the memory that `keep` gave away."""
        if predicted and self._predictor is not None:
            self._predictor.give_back(list(predicted.values()), [self._index[name] for name in predicted])
