"""Which backward calls belong only to one forward call."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxpipe.ir.aten import is_getitem
from fxpipe.ir.program import Program, info
from fxpipe.passes.analysis.whole_call import WholeCall, changed_numbers, computes_nothing, whole_call


class BackwardCalls:
    """The backward calls of every forward call, by autograd's number; and what `depends` on what is trained."""

    def __init__(self, program: Program) -> None:
        placeholders = program.placeholders
        self.depends = {placeholders[p.node] for p in program.parameters if p.trained}
        self.forward: dict[Any, list[fx.Node]] = {}
        self.backward: dict[Any, list[fx.Node]] = {}
        for node in program:
            number = node.meta.get("seq_nr")
            if computes_nothing(node):
                if any(n in self.depends for n in node.all_input_nodes):
                    self.depends.add(node)
            elif info(node).phase == "B":
                self.backward.setdefault(number, []).append(node)
            elif any(n in self.depends for n in node.all_input_nodes):
                self.depends.add(node)
                if not is_getitem(node):
                    self.forward.setdefault(number, []).append(node)

    def of(self, node: fx.Node) -> list[fx.Node] | None:
        """The backward calls that may use a forward call's numbers; None if unknown, or perhaps of another call."""
        if node not in self.depends:
            return []
        calls = self.backward.get(node.meta.get("seq_nr"), [])
        if not all(isinstance(whole_call(n), WholeCall) for n in calls):
            return None
        if any(changed_numbers(n) for n in calls) and not self.alone(node):
            return None
        return calls

    def alone(self, node: fx.Node) -> bool:
        """Whether the backward calls with a forward call's number are its own, or those of the call it is a part of."""
        number = node.meta.get("seq_nr")
        return len(self.forward.get(number, [])) == 1 and bool(self.backward.get(number))
