"""``examples/slurm.sbatch``: its options exist, and it goes on where it should, on a batch system made of paper."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "slurm.sbatch"
BASH = shutil.which("bash")
TEXT = SCRIPT.read_text("utf-8")

# What the script calls of a cluster. Its torchrun plays what stands in the next line of PLAN.
FAKES = {
    "scontrol": """
        case $1 in
            show) echo one; echo two ;;
            requeue) echo "requeue $2" >>"$LOG" ;;
        esac""",
    "getent": 'echo "127.0.1.1 STREAM $2"; echo "10.0.0.7 STREAM $2"',
    "ip": 'echo "1: lo inet 127.0.0.1/8"; echo "2: wire0 inet 10.0.0.7/24"',
    "srun": """
        while [[ $1 == --* ]]; do shift; done
        SLURM_NODEID=0 SLURMD_NODENAME=one "$@" &
        trap 'kill -USR1 $!' USR1
        wait $!
        code=$?
        while kill -0 $! 2>/dev/null; do wait $!; code=$?; done
        exit $code""",
    "augend": 'echo "augend $*" >>"$LOG"; [[ $2 != bad.toml ]]',
    "torchrun": """
        echo "torchrun $*" >>"$LOG"
        echo "$GLOO_SOCKET_IFNAME $TORCH_DISABLE_SHARE_RDZV_TCP_STORE $OMP_NUM_THREADS" >>"$LOG.environment"
        move=$(head -n 1 "$PLAN")
        sed -i 1d "$PLAN"
        case $move in
            done) exit 0 ;;
            fail) exit 1 ;;
            wait)
                trap 'echo TERM >>"$LOG"; exit 1' TERM
                echo waiting >>"$LOG"
                for _ in {1..200}; do sleep 0.05; done ;;
        esac""",
}


class Cluster:
    """A directory of commands that play a batch system, and what they wrote down."""

    def __init__(self, home: Path, fakes: Mapping[str, str] = FAKES) -> None:
        self.log = home / "log"
        self.run_dir = home / "runs" / "a run"
        self.work = ["augend fit run.toml --dry-run", f"fit run.toml --run-dir {self.run_dir}"]
        self._plan = home / "plan"
        bin_dir = home / "bin"
        bin_dir.mkdir()
        for name, body in fakes.items():
            (bin_dir / name).write_text(f"#!/usr/bin/env bash\n{body}\n", "utf-8")
            (bin_dir / name).chmod(0o755)
        self.environment = {
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "AUGEND_BIN": str(bin_dir),
            "RANKS_PER_NODE": "2",
            "LOG": str(self.log),
            "PLAN": str(self._plan),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "some",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "8",
        }

    def start(self, *plan: str, run_file: Path = Path("run.toml")) -> subprocess.Popen[str]:
        """Start the script; a torchrun of paper plays the plan."""
        self._plan.write_text("".join(f"{move}\n" for move in plan), "utf-8")
        self.log.write_text("", "utf-8")
        command = [BASH, str(SCRIPT), str(run_file), str(self.run_dir)]
        return subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def works(self) -> list[str]:
        """Return what augend was called with, run by run, and what else was written down."""
        lines = self.log.read_text("utf-8").splitlines()
        return [line.partition(" -m augend ")[2] if line.startswith("torchrun ") else line for line in lines]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Return a cluster of paper."""
    return Cluster(tmp_path)


def ended(process: subprocess.Popen[str], seconds: float = 30) -> tuple[int, str]:
    """Return exit code and output of a process that ends by itself."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, output


def options(text: str) -> set[str]:
    """Return the long options in a text."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_bash_accepts_it() -> None:
    """The script parses, and says how it is called if it is called otherwise."""
    subprocess.run([BASH, "-n", str(SCRIPT)], check=True)
    done = subprocess.run([BASH, str(SCRIPT), "run.toml"], check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "usage: sbatch examples/slurm.sbatch RUN.TOML DIR" in done.stderr


def test_directives_come_before_the_first_command() -> None:
    """sbatch reads directives up to the first command; each is one option with its value, and the signal is trapped."""
    commands = [n for n, line in enumerate(TEXT.splitlines()) if line.strip() and not line.startswith("#")]
    directives = {n: line for n, line in enumerate(TEXT.splitlines()) if line.startswith("#SBATCH")}
    assert max(directives) < min(commands)
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in directives.values())
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:USR1@300", "#SBATCH --ntasks-per-node=1"} <= set(
        directives.values()
    )
    assert "trap stop USR1 TERM" in TEXT


def test_torchrun_has_the_options() -> None:
    """Every option that torchrun is given is one of this torch's torchrun."""
    (call,) = re.findall(r'torchrun" \\\n(.*?) -m augend "\$@"', TEXT, re.DOTALL)
    known = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert len(options(call)) >= 8
    assert set() == options(call) - known


def test_augend_has_the_verb_and_its_options() -> None:
    """The verb and every option that augend is given are its own."""
    (verb, arguments) = re.search(r"bash (\w+) (.*) &", TEXT).groups()
    told = subprocess.run([sys.executable, "-m", "augend", verb, "--help"], capture_output=True, text=True, check=True)
    arguments += re.search(r'/augend" fit (.*) #', TEXT)[1]
    assert {"--run-dir", "--dry-run"} == options(arguments)
    assert set() == options(arguments) - options(told.stdout)


def test_every_machine_is_told_where_the_others_are(cluster: Cluster) -> None:
    """Each torchrun gets the store's host, its own address and interface, and its share of the processors."""
    assert (0, "") == ended(cluster.start("done"))
    assert cluster.work == cluster.works()
    for part in (
        "--nnodes=2 --nproc-per-node=2",
        "--rdzv-endpoint=one:29407",
        "--rdzv-conf=is_host=1",
        "--local-addr=10.0.0.7",
        "--rdzv-id=7.0 ",
    ):
        assert part in cluster.log.read_text("utf-8")
    assert "wire0 1 4\n" == Path(f"{cluster.log}.environment").read_text("utf-8")


def test_a_failure_is_the_jobs(cluster: Cluster) -> None:
    """A run that fails, restarts and all, ends the job with its exit code, and nothing is queued again."""
    assert (1, "") == ended(cluster.start("fail"))
    assert cluster.work == cluster.works()


def test_a_mistake_in_the_run_file_ends_the_job_at_once(cluster: Cluster) -> None:
    """What augend refuses is refused once, and no rank is started."""
    assert (1, "") == ended(cluster.start(run_file=Path("bad.toml")))
    assert ["augend fit bad.toml --dry-run"] == cluster.works()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stop_is_passed_on_once_and_requeues(cluster: Cluster, number: signal.Signals) -> None:
    """At the time limit or a preemption torchrun gets one SIGTERM, and the job is queued again."""
    process = cluster.start("wait")
    end = time.monotonic() + 20
    while "waiting" not in cluster.works() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)
    code, output = ended(process)
    assert (0, "stopped; the job goes back into the queue") == (code, output.splitlines()[-1])
    assert [*cluster.work, "waiting", "TERM", "requeue 7"] == cluster.works()
    assert (0, "") == ended(cluster.start("done"))  # the same command, which goes on
    assert cluster.work == cluster.works()


RUN = """
steps = 60
batch_size = 64
microbatch_size = 8
[model]
name = "mlp"
sizes = [64, 32, 10]
[data]
source = "digits"
validation = 0.0
"""


@pytest.mark.long
def test_a_job_of_real_ranks_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """With torchrun itself, on one machine: two ranks save at the signal, the next job takes every step left once."""
    fakes = {name: FAKES[name] for name in ("srun", "getent")}
    fakes["getent"] = "echo 127.0.1.1 STREAM one"
    fakes["scontrol"] = FAKES["scontrol"].replace("echo one; echo two", "echo localhost")
    cluster = Cluster(tmp_path, fakes)
    cluster.environment |= {"AUGEND_BIN": str(Path(sys.executable).parent), "SLURM_JOB_NUM_NODES": "1"}
    (tmp_path / "run.toml").write_text(RUN, "utf-8")
    metrics = cluster.run_dir / "metrics.jsonl"
    process = cluster.start(run_file=tmp_path / "run.toml")
    end = time.monotonic() + 90
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 5) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    code, output = ended(process, seconds=60)
    assert (0, ["requeue 7"]) == (code, cluster.works()), output
    done = len(metrics.read_bytes().splitlines())
    assert 5 < done < 60
    code, output = ended(cluster.start(run_file=tmp_path / "run.toml"), seconds=120)
    assert 0 == code, output
    records = [json.loads(line) for line in metrics.read_bytes().splitlines()]
    assert [*range(60)] == [record["step"] for record in records]
    assert {2} == {record["world"] for record in records}
