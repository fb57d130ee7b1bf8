"""Where branches of a model meet, and who waits for whom with given cuts."""

from __future__ import annotations

from branched import branched
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.errors import ProfileError
from fxpipe.planner.branches import borders, cut_at, graph_of_cuts
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.profile import Profile, Unit, Value, backward_values, read_profile_json
from fxpipe.schedule.graph import Graph, graph_of


def test_borders_are_where_a_branch_begins_with_the_batch() -> None:
    profile = branched(4, 4, 4)
    assert borders(profile, 3) == (4, 8)
    assert borders(branched(12), 3) == ()
    assert borders(branched(1, 11), 3) == (), "the first branch has too little work for a worker of its own"
    assert borders(branched(1, 11), 8) == (1,)


def test_branches_of_a_trunk_have_borders_too() -> None:
    """Query, key and value of an attention are branches, but too small to count."""
    units = tuple(Unit(f"u{i}", 1.0, 2.0, output_bytes=1.0) for i in range(10))
    reads = [(0, (1, 4, 7)), (1, (2,)), (2, (3,)), (3, (9,)), (4, (5,)), (5, (6,)), (6, (9,)), (7, (8,)), (8, (9,))]
    values = tuple(Value(unit, 1.0, readers) for unit, readers in reads)
    profile = Profile(units, values, backward_values(units, values))
    assert borders(profile, 4) == (4, 7)
    assert borders(profile, 1) == ()


def test_the_graph_of_cuts() -> None:
    profile = branched(4, 4)
    assert graph_of_cuts(profile, Cuts((0, 2, 4, 6, 9), (0, 2, 4, 6, 9))) == ((), (0,), (), (1, 2))
    assert graph_of_cuts(profile, Cuts((0, 4, 8, 9), (0, 4, 8, 9))) == ((), (), (0, 1))
    assert graph_of_cuts(profile, Cuts((0, 3, 6, 9), (0, 3, 6, 9))) == ()
    assert graph_of_cuts(profile, Cuts((0, 4, 8, 9), (0, 3, 8, 9))) == (), "the left tower's last backward is elsewhere"


@given(st.data())
def test_the_graph_of_cuts_is_who_reads_what_others_make(data: st.DataObject) -> None:
    count, workers = data.draw(st.integers(2, 8)), data.draw(st.integers(1, 4))
    later = [data.draw(st.sets(st.integers(i + 1, count - 1), max_size=2)) for i in range(count - 1)]
    values = [Value(i, 1.0, tuple(sorted(readers))) for i, readers in enumerate(later) if readers]
    batch = data.draw(st.sets(st.integers(1, count - 1)))
    gradients = [
        Value(i, 1.0, (data.draw(st.integers(0, i - 1)),)) for i in range(1, count) if data.draw(st.booleans())
    ]
    units = tuple(Unit(f"u{i}", 1.0, 1.0, float(data.draw(st.booleans()))) for i in range(count))
    own = [Value(0, 1.0, tuple(sorted(batch)), batch=True)] if batch else []
    cut = st.lists(st.integers(0, count), min_size=workers - 1, max_size=workers - 1).map(sorted)
    forward, backward = (tuple([0, *data.draw(cut), count]) for _ in range(2))
    weights = tuple(max(b, w) for b, w in zip(backward, [0, *data.draw(cut), count], strict=True))
    cuts = Cuts(forward, backward, weights)

    def of(bounds: tuple[int, ...], unit: int) -> int:
        return next(k for k in range(workers) if bounds[k] <= unit < bounds[k + 1])

    pairs = {(of(forward, v.producer), of(forward, r)) for v in values for r in v.readers}
    pairs |= {(of(backward, r), of(backward, v.producer)) for v in gradients for r in v.readers}
    pairs |= {(of(weights, i), of(backward, i)) for i, unit in enumerate(units) if unit.weight_ms}
    expected: Graph = graph_of({(a, b) for a, b in pairs if a != b}, {of(forward, r) for r in batch}, workers)
    assert graph_of_cuts(Profile(units, (*values, *own), tuple(gradients)), cuts) == expected


def test_cuts_at_borders_are_moved_there_or_shared_out() -> None:
    profile = branched(4, 4, 2)
    moved, shared = cut_at(profile, borders(profile, 5), Cuts((0, 2, 5, 7, 9, 11), (0, 2, 5, 7, 9, 11)))
    assert moved.forward == (0, 2, 4, 8, 9, 11)
    assert shared.forward == (0, 2, 4, 6, 8, 11)


def test_a_profile_keeps_what_is_of_the_batch() -> None:
    profile = branched(2, 2)
    assert '"batch": true' in profile.to_json()
    assert read_profile_json(profile.to_json(), error=ProfileError) == profile
