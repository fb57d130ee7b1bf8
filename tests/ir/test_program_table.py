"""The program as rows: what a build keeps of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cached import lowered

import fxpipe
from fxpipe.errors import BuildError
from fxpipe.ir.program_table import ProgramTable, Row, read_table


@pytest.fixture(scope="module")
def build() -> fxpipe.Build:
    return lowered("gpt", workers=3)


@pytest.fixture
def table(build: fxpipe.Build) -> ProgramTable:
    assert build.nodes is not None
    return build.nodes


def test_text_and_back(table: ProgramTable, tmp_path: Path) -> None:
    text = table.to_json()
    (tmp_path / "nodes.json").write_text(text)
    assert read_table(tmp_path / "nodes.json") == table
    body = json.loads(text)
    assert body["columns"] == list(Row._fields)
    assert len(body["rows"]) == len(table.rows)


def test_inputs_stand_before_their_readers_and_names_are_unique(table: ProgramTable) -> None:
    assert all(source < number for number, row in enumerate(table.rows) for source in row.inputs)
    assert len({row.name for row in table.rows}) == len(table.rows)


def test_the_workers_costs_are_those_of_the_rows(build: fxpipe.Build, table: ProgramTable) -> None:
    for worker in build.workers:
        own = [row for row in table.rows if row.worker == worker.rank and row.ms is not None]
        assert sum(r.ms or 0 for r in own if r.phase == "F") == pytest.approx(1e3 * worker.forward)
        assert sum(r.ms or 0 for r in own if r.phase == "B" and not r.weight) == pytest.approx(1e3 * worker.backward)
        assert sum(r.ms or 0 for r in own if r.weight) == pytest.approx(1e3 * worker.weight)


def test_every_edge_is_sent_and_received(build: fxpipe.Build, table: ProgramTable) -> None:
    assert set(table.sends) == {edge.name for edge in build.plan.edges}
    for edge in build.plan.edges:
        sent = table.rows[table.sends[edge.name]]
        assert (sent.op, sent.worker, sent.phase, sent.bytes) == ("send", edge.src, edge.src_phase, edge.tensor.bytes)
        (received,) = (row for row in table.rows if table.sends[edge.name] in row.inputs)
        assert (received.op, received.worker, received.phase) == ("recv", edge.dst, edge.dst_phase)


def test_no_other_value_crosses_workers(table: ProgramTable) -> None:
    for row in table.rows:
        for source in (table.rows[number] for number in row.inputs):
            assert row.op == "recv" or source.phase is None or source.worker == row.worker


def test_placeholders_have_the_models_names_and_their_owners(build: fxpipe.Build, table: ProgramTable) -> None:
    owners = {row.text.split(", ")[0]: row.worker for row in table.rows if row.op == "parameter"}
    assert owners == {p.name: p.owner for p in build.plan.parameters}
    assert {table.names[row.name] for row in table.rows if row.op == "parameter"} == {
        p.names for p in build.plan.parameters
    }
    assert {row.text for row in table.rows if row.op == "input"} == {
        leaf.name for leaf in build.plan.step.batch if leaf.tensor
    }


def test_it_stands_in_the_folder_and_comes_back(build: fxpipe.Build, table: ProgramTable, tmp_path: Path) -> None:
    build.save(tmp_path / "build")
    loaded = fxpipe.load(tmp_path / "build")
    assert loaded.nodes == table
    assert loaded.profile == build.profile
    assert loaded.passes == build.passes
    assert [line.split()[0] for line in build.passes] == [
        "fold", "keep_layouts", "units", "cost", "cut", "rematerialize", "comm", "cast_weights", "send_early", "split",
        "outline", "codegen",
    ]  # fmt: skip
    assert re.fullmatch(r"fold +\d+ → \d+ nodes", build.passes[0])
    assert loaded.costs.optimizer_bytes == build.costs.optimizer_bytes
    again = loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / "nodes.json").read_text() == (tmp_path / "build" / "nodes.json").read_text()
    assert again.nodes == table


def test_a_build_without_it_loads(build: fxpipe.Build, tmp_path: Path) -> None:
    build.save(tmp_path)
    for name in ("nodes.json", "profile.json", "passes.txt"):
        (tmp_path / name).unlink()
    loaded = fxpipe.load(tmp_path)
    assert loaded.passes == ()
    assert loaded.nodes is None
    assert loaded.profile is None
    assert loaded.workers == build.workers
    costs = json.loads((tmp_path / "costs.json").read_text())
    del costs["format"]  # an earlier fxpipe's, in milliseconds
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    with pytest.raises(BuildError, match=r"costs\.json cannot be read: its format is not 7"):
        fxpipe.load(tmp_path)
    (tmp_path / "costs.json").unlink()
    assert fxpipe.load(tmp_path).workers == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2, "columns": [], "rows": []}', '{"format": 1}'])
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "nodes.json").write_text(text)
    with pytest.raises(BuildError, match=r"nodes\.json cannot be read") as caught:
        read_table(tmp_path / "nodes.json")
    assert "compile again" in str(caught.value)


@pytest.mark.parametrize("name", ["nodes.json", "profile.json", "costs.json"])
def test_a_broken_file_is_named(build: fxpipe.Build, tmp_path: Path, name: str) -> None:
    build.save(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(BuildError, match=f"{name} cannot be read"):
        fxpipe.load(tmp_path)


def test_every_trained_parameter_has_the_node_that_makes_its_gradient(build: fxpipe.Build, table: ProgramTable) -> None:
    by_name = {row.name: row for row in table.rows}
    trained = {p.name: p for p in build.plan.parameters if p.trained}
    assert {by_name[name].text.split(", ")[0] for name in table.gradients} == set(trained)
    for name, number in table.gradients.items():
        made, parameter = table.rows[number], trained[by_name[name].text.split(", ")[0]]
        assert (made.phase, made.worker, made.type) == ("B", parameter.owner, by_name[name].type)
