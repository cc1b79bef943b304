"""``examples/slurm.sbatch``: its options exist, and it goes on where it should, on a batch system made of paper."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
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

    def __init__(self, home: Path) -> None:
        self.log = home / "log"
        self.run_dir = home / "runs" / "a run"
        self.work = f"fit run.toml --run-dir {self.run_dir}"
        self._plan = home / "plan"
        bin_dir = home / "bin"
        bin_dir.mkdir()
        for name, body in FAKES.items():
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

    def start(self, *plan: str) -> subprocess.Popen[str]:
        """Start the script; its torchruns play the plan."""
        self._plan.write_text("".join(f"{move}\n" for move in plan), "utf-8")
        self.log.write_text("", "utf-8")
        command = [BASH, str(SCRIPT), "run.toml", str(self.run_dir)]
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


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit code and output of a process that ends by itself."""
    try:
        output, _ = process.communicate(timeout=30)
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
    assert {"--run-dir"} == options(arguments)
    assert set() == options(arguments) - options(told.stdout)


def test_every_machine_is_told_where_the_others_are(cluster: Cluster) -> None:
    """Each torchrun gets the store's host, its own address and interface, and its share of the processors."""
    assert (0, "") == ended(cluster.start("done"))
    assert [cluster.work] == cluster.works()
    for part in (
        "--nnodes=2 --nproc-per-node=2",
        "--rdzv-endpoint=one:29400",
        "--rdzv-conf=is_host=1",
        "--local-addr=10.0.0.7",
        "--rdzv-id=7.0 ",
    ):
        assert part in cluster.log.read_text("utf-8")
    assert "wire0 1 4\n" == Path(f"{cluster.log}.environment").read_text("utf-8")


def test_a_failure_is_the_jobs(cluster: Cluster) -> None:
    """A run that fails, restarts and all, ends the job with its exit code, and nothing is queued again."""
    assert (1, "") == ended(cluster.start("fail"))
    assert [cluster.work] == cluster.works()


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
    assert [cluster.work, "waiting", "TERM", "requeue 7"] == cluster.works()
    assert (0, "") == ended(cluster.start("done"))  # the same command, which goes on
    assert [cluster.work] == cluster.works()
