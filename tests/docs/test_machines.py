"""docs/how-to/machines.md: its scripts do what it says, with stand-ins for Slurm and Ray; its manifests are valid."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fxpipe.cli.run import run_command

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "machines.md").read_text(encoding="utf-8")

STANDS_IN = {
    "scontrol": 'echo "node0"; echo "node1"',
    "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    "torchrun": 'printf "%s " "$@"; echo',
}


def block(section: str, language: str) -> str:
    (text,) = [part for part in PAGE.split("\n## ") if part.startswith(f"{section}\n")]
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.S)
    return str(found)


def manifest(section: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed; `make venv` installs it")
    found = yaml.safe_load(block(section, "yaml"))
    assert isinstance(found, dict)
    return found


def is_bash(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0


def options_of_run() -> set[str]:
    return {name for parameter in run_command.params for name in parameter.opts}


def test_the_slurm_script_is_one() -> None:
    script = block("Slurm", "bash")
    assert is_bash(script)
    assert not is_bash(script + "if")
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    header, body = script.split("\n\n", 1)
    assert "#SBATCH" not in body  # Slurm reads none behind the first command
    assert {line.split("=")[0] for line in header.splitlines()[1:]} >= {"#SBATCH --nodes", "#SBATCH --ntasks-per-node"}


def launched(folder: Path) -> list[list[str]]:
    """What the script starts on two nodes: the arguments of each torchrun."""
    (folder / "bin").mkdir()
    for name, text in STANDS_IN.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    script = block("Slurm", "bash").replace("/shared", str(folder))
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]"}
    done = subprocess.run(["bash", "-c", script], env=environment, text=True, capture_output=True, check=True)
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_slurm_script_starts_every_node(goes_on: bool, tmp_path: Path) -> None:
    if goes_on:
        (tmp_path / "out" / "checkpoints" / "step-500").mkdir(parents=True)
    started = launched(tmp_path)
    for rank, arguments in enumerate(started):
        before, command = arguments[: arguments.index("fxpipe")], arguments[arguments.index("fxpipe") :]
        assert before == shlex.split(
            f"--nnodes 2 --node-rank {rank} --nproc-per-node 2 --master-addr node0 --master-port 29500 --no-python"
        )
        assert command[:3] == ["fxpipe", "run", f"{tmp_path}/build"]
        assert ("--resume" in command) is goes_on
        assert {a for a in command if a.startswith("--")} <= options_of_run()
    assert len(started) == 2


def test_the_manifest_is_a_pytorch_job() -> None:
    """What the schema of kubeflow.org/v1 demands of one."""
    job = manifest("Kubernetes: PyTorchJob")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in ("None", "Running", "All")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        assert replica["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        pod = replica["template"]["spec"]
        (container,) = [c for c in pod["containers"] if c["name"] == "pytorch"]
        assert container["image"]
        assert container["command"] == ["bash", "-c"]
        (script,) = container["args"]
        assert is_bash(script)
        assert set(re.findall(r"(?<= )--[\w-]+", script)) <= options_of_run()
        assert {m["name"] for m in container["volumeMounts"]} <= {v["name"] for v in pod["volumes"]}


def runs_fxpipe(script: str) -> bool:
    options = re.findall(r"(?<= )--[\w-]+", script.partition(" fxpipe run ")[2])
    return is_bash(script) and bool(options) and set(options) <= options_of_run()


def test_the_manifest_is_a_train_job() -> None:
    """What the schema of trainer.kubeflow.org/v1alpha1 demands of one."""
    job = manifest("Kubernetes: TrainJob")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(job["spec"]) == {"runtimeRef", "trainer", "podTemplateOverrides"}
    trainer = job["spec"]["trainer"]
    assert set(trainer) == {"image", "numNodes", "numProcPerNode", "resourcesPerNode", "command", "args"}
    assert runs_fxpipe(trainer["args"][0])
    (override,) = job["spec"]["podTemplateOverrides"]
    (container,) = override["spec"]["containers"]
    assert {m["name"] for m in container["volumeMounts"]} <= {v["name"] for v in override["spec"]["volumes"]}


def test_the_task_of_skypilot_starts_torchrun() -> None:
    task = manifest("SkyPilot")
    assert set(task) == {"name", "num_nodes", "resources", "volumes", "run"}
    assert runs_fxpipe(task["run"])


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_worker_of_ray_runs_torchrun(goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = dict.fromkeys(("FailureConfig", "RunConfig", "ScalingConfig"))
    contents: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.train": {**names, "get_context": lambda: SimpleNamespace(get_world_rank=lambda: 1)},
        "ray.train.torch": {"TorchTrainer": None},
    }
    for name, content in contents.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(content)
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    started: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: started.append(command))
    if goes_on:
        (tmp_path / "out" / "checkpoints" / "step-500").mkdir(parents=True)
    script: dict[str, Any] = {"__name__": "train"}
    exec(block("Ray Train", "python").replace("/shared", str(tmp_path)), script)
    script["train"]()
    (command,) = started
    assert command[: command.index("fxpipe")] == shlex.split(
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr node0 --master-port 29500 --no-python"
    )
    assert ("--resume" in command) is goes_on
    assert {a for a in command[command.index("fxpipe") :] if a.startswith("--")} <= options_of_run()
