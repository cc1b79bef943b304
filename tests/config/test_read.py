"""Reading run files: defaults, overrides, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from augend._config import Setting, read, to_toml
from augend.errors import ConfigError

LEAST = '[model]\nname = "llama"\n[data]\nsource = "docstrings"\n'

# what is written above the tables, what below them, what --set says; then the parts that the one line must have
MISTAKES = [
    ("stepz = 400", "", [], ["stepz = 400", "unknown key", "did you mean step"]),
    ("exact = 1", "", [], ["exact = 1", "unknown key", "known here: accumulator, adapter, batch_size, checkpoint"]),
    ("checkpoint = 1", "", [], ["checkpoint = 1", "expected a table", "[checkpoint]"]),
    ("", "[checkpoint]\nevery = 2", [], ["checkpoint.every = 2", "unknown key", "every_seconds, every_steps, keep"]),
    ("", "[checkpoint]\nkeep = 0", [], ["checkpoint.keep = 0", "expected int >= 1", "for example keep = 2"]),
    ("", "[checkpoint]\nevery_steps = 0", [], ["checkpoint.every_steps = 0", "int >= 1", "every_steps = 100"]),
    ("", "[checkpoint]\nevery_seconds = 0", [], ["checkpoint.every_seconds = 0", "float > 0", "every_seconds = 60.0"]),
    ("", "[checkpoint]\nevery_seconds = inf", [], ["checkpoint.every_seconds = inf", "expected a finite float"]),
    ("", "[step]\nmax_nrm = 1.0", [], ["step.max_nrm = 1.0", "unknown key", "did you mean max_norm"]),
    (
        "",
        "[parallel]\nrank = 2",
        [],
        ["parallel.rank = 2", "unknown key", "did you mean ranks", "mode, ranks, replicas"],
    ),
    ('steps = "many"', "", [], ["steps = 'many'", "expected int, got str", "for example steps = 400"]),
    ("steps = 1.5", "", [], ["steps = 1.5", "expected int, got float"]),
    ("batch_size = true", "", [], ["batch_size = true", "expected int, got bool", "for example batch_size = 64"]),
    ("seed = [0]", "", [], ["seed = [0]", "expected int, got list"]),
    ("", "[step]\nmax_norm = {}", [], ["step.max_norm = {}", "expected float, got table"]),
    ('optimizer = "adamw"', "", [], ["optimizer = 'adamw'", "expected a table", "[optimizer]"]),
    ("steps = 0", "", [], ["steps = 0", "expected int >= 1"]),
    ("batch_size = 0", "", [], ["batch_size = 0", "expected int >= 1", "for example batch_size = 64"]),
    ("seed = -1", "", [], ["seed = -1", "expected int >= 0"]),
    ("batch_size = 4\nmicrobatch_size = 8", "", [], ["microbatch_size = 8", "batch_size = 4", "lower"]),
    ("", "[optimizer]\nlr = -0.001", [], ["optimizer.lr = -0.001", "expected float > 0", "for example lr = 0.001"]),
    ("", "[optimizer]\nlr = inf", [], ["optimizer.lr = inf", "expected a finite float", "for example lr = 0.001"]),
    ("", "[accumulator]\nloss_scale = inf", [], ["accumulator.loss_scale = inf", "expected a finite float"]),
    ("", "[optimizer]\nlr = nan", [], ["optimizer.lr = nan", "expected float > 0"]),
    ("", "[step]\nmax_norm = -1.0", [], ["step.max_norm = -1.0", "expected float > 0", "for example max_norm = 1.0"]),
    ("", '[accumulator]\ndtype = "int64"', [], ["accumulator.dtype = 'int64'", "one of 'float32', 'float64', 'exact'"]),
    ("", "[accumulator]\nmax_microbatches = 0", [], ["accumulator.max_microbatches = 0", "expected int >= 1"]),
    (
        "batch_size = 9\nmicrobatch_size = 2",
        "[accumulator]\nmax_microbatches = 4",
        [],
        ["accumulator.max_microbatches = 4", "a batch of 9 rows has 5 micro-batches of 2; set it to more"],
    ),
    ("", "[parallel]\nthreads = 0", [], ["parallel.threads = 0", "expected int >= 1", "for example threads = 1"]),
    ("", "[digest]\nevery_steps = 0", [], ["digest.every_steps = 0", "expected int >= 1", "every_steps = 10"]),
    ("", "[digest]\nevery = 2", [], ["digest.every = 2", "unknown key; did you mean every_steps"]),
    ("", "[accumulator]\nloss_scale = 0", [], ["accumulator.loss_scale = 0", "expected float > 0"]),
    ("", '[step]\nnonfinite = "ignore"', [], ["step.nonfinite = 'ignore'", "one of 'raise', 'skip'"]),
    ("", '[parallel]\nmode = "ddp"', [], ["parallel.mode = 'ddp'", "one of 'replicated', 'fsdp', 'hsdp'"]),
    ("", "[parallel]\nreplicas = 2", [], ["parallel.replicas = 2", "'fsdp' has no such key", "'hsdp'"]),
    (
        "",
        "",
        ["parallel.mode=replicated", "parallel.replicas=2"],
        ["parallel.replicas = 2", "'replicated' has no such"],
    ),
    ("", '[parallel]\nranks = 3\nmode = "hsdp"', [], ["parallel.ranks = 3", "replicas = 2", "a multiple of it"]),
    ("", "", ["parallel.ranks=2", "parallel.mode=hsdp", "parallel.replicas=4"], ["parallel.ranks = 2", "replicas = 4"]),
    ("", "[parallel]\nreplicas = 0", [], ["parallel.replicas = 0", "expected int >= 1", "for example replicas = 2"]),
    (
        "",
        "[parallel]\ntimeout_seconds = 0",
        [],
        ["timeout_seconds = 0", "expected float >= 1", "timeout_seconds = 30.0"],
    ),
    ("", "[parallel]\ntimeout_seconds = inf", [], ["timeout_seconds = inf", "expected float <= 1000000"]),
    ("", "[parallel]\nranks = 0", [], ["parallel.ranks = 0", "expected int >= 1"]),
    ("steps = 4\nepochs = 2", "", [], ["steps = 4", "epochs = 2", "keep one"]),
    ("", "[validate]\nevery_steps = 0", [], ["validate.every_steps = 0", "expected int >= 1", "every_steps = 100"]),
    ("", "[validate]\npatience = 2", ["data.validation=0"], ["validate.patience = 2", "data.validation is 0"]),
    ("", "[validate]\nevery_steps = 2", ["data.validation=0"], ["validate.every_steps = 2", "data.validation is 0"]),
    ("", "", ["data.validation=1"], ["data.validation = 1", "expected float < 1"]),
    ("", "", ["data.validation=-0.1"], ["data.validation = -0.1", "expected float >= 0"]),
    ("steps = 4", "", ["steps.x=1"], ["steps.x = 1", "steps is 4 and no table"]),
    ("", "", ["optimizer.lr=fast"], ["optimizer.lr = 'fast'", "expected float, got str"]),
    ("", "", ["model.name=3"], ["model.name = 3", "expected str, got int", "llama"]),
    ("adapter = 4", "", [], ["adapter = 4", "expected a table", "[adapter]"]),
    ("", "[adapter]\nalpha = 4.0", [], ["adapter.rank: missing", "write [adapter] with rank = 8"]),
    ("", "", ["adapter.dropout=0.1"], ["adapter.rank: missing"]),
    ("", "[adapter]\nrank = 0", [], ["adapter.rank = 0", "expected int >= 1", "for example rank = 8"]),
    ("", "[adapter]\nrang = 4", [], ["adapter.rang = 4", "unknown key; did you mean rank"]),
    ("", "[adapter]\nrank = 4\nalpha = inf", [], ["adapter.alpha = inf", "a finite float", "for example alpha = 16.0"]),
    ("", "[adapter]\nrank = 4\ndropout = 1", [], ["adapter.dropout = 1", "expected float < 1"]),
    (
        "",
        '[adapter]\nrank = 4\ntargets = "q_proj"',
        [],
        ["adapter.targets = 'q_proj'", "expected list, got str", "for example targets = ['q_proj', 'k_proj',"],
    ),
    ("", '[adapter]\nrank = 4\ntargets = ["q_proj", 3]', [], ["adapter.targets = ['q_proj', 3]", "str, got int"]),
    ("", "", ["model.freeze=norm"], ["model.freeze = 'norm'", "got str", "freeze = ['model.embed_tokens.*']"]),
    ("", "", ["model.dtype=float32"], ["model.dtype = 'float32'", "one of 'bfloat16', 'float16'", "torch.autocast"]),
    ("", "", ["data.pack=1"], ["data.pack = 1", "expected int >= 2", "for example pack = 512"]),
    ("steps =", "", [], ["not valid TOML", "line 1"]),
    ("steps = 1\nsteps = 2", "", [], ["not valid TOML", "line 2"]),
]

# whole files in which something is missing
LACKING = [
    ("", ["model.name", "missing", "no default", "name = 'llama'"]),
    ("[model]\n", ["model.name", "missing"]),
    ('[model]\nname = "mlp"\n', ["data.source", "missing", "source = 'docstrings'"]),
    ('[model]\nname = "mlp"\n[data]\nvalidation = 0.1\n', ["data.source", "missing"]),
]


def written(folder: Path, text: str) -> Path:
    """Write a run file."""
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, settings: list[str]) -> str:
    """Return the message with which a run file is refused."""
    with pytest.raises(ConfigError) as caught:
        read(path, [Setting.parse(setting) for setting in settings])
    return str(caught.value)


@pytest.mark.parametrize(("above", "below", "settings", "parts"), MISTAKES)
def test_a_mistake_is_one_line_with_key_value_and_remedy(tmp_path, above, below, settings, parts):
    """Every kind of mistake is refused in one line that names the file, the key, its value and what to do."""
    message = refusal(written(tmp_path, f"{above}\n{LEAST}{below}\n"), settings)
    assert [] == [part for part in [str(tmp_path / "run.toml"), *parts] if part not in message]
    assert "\n" not in message


@pytest.mark.parametrize(("text", "parts"), LACKING)
def test_what_has_no_default_is_asked_for(tmp_path, text, parts):
    """A run file without model or data is refused by the key, with a line to write."""
    message = refusal(written(tmp_path, text), [])
    assert [] == [part for part in parts if part not in message]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """A missing file, a directory and a file that is not UTF-8 are each refused by name."""
    (tmp_path / "run.toml").write_bytes(b"steps = 1 # \xff")
    assert f"{tmp_path}/none.toml: no such file" in refusal(tmp_path / "none.toml", [])
    assert f"{tmp_path}: cannot be read as a run file: Is a directory" in refusal(tmp_path, [])
    assert "run.toml: not UTF-8 at byte 12" in refusal(tmp_path / "run.toml", [])


@pytest.mark.parametrize("setting", ["steps", "=4", ".steps=4", "optimizer.=4", ""])
def test_a_setting_without_key_or_value_is_refused(setting):
    """--set without a key or an equals sign is refused with an example."""
    with pytest.raises(ConfigError, match=r"^--set .*: expected key=value .*--set optimizer.lr=3e-4$"):
        Setting.parse(setting)


def test_every_key_but_model_and_data_has_a_default(tmp_path):
    """The shortest run file is complete: one epoch of whole batches of 64 rows in micro-batches of 8."""
    run = read(written(tmp_path, LEAST))
    assert (None, 1, 64, 8) == (run.steps, run.epochs, run.batch_size, run.microbatch_size)
    assert ("adamw", 1e-3, "constant") == (run.optimizer.name, run.optimizer.lr, run.schedule.name)
    assert ("float32", None) == (run.accumulator.dtype, run.step.max_norm)
    parallel = run.parallel
    assert (1, "fsdp", None, 30.0) == (parallel.ranks, parallel.mode, parallel.replicas, parallel.timeout_seconds)
    assert (60.0, None, 2) == (run.checkpoint.every_seconds, run.checkpoint.every_steps, run.checkpoint.keep)


def test_an_exact_run_has_one_thread_and_digests_unless_others_are_asked_for(tmp_path):
    """dtype = "exact" writes out what the bits depend on; other dtypes leave the machine its threads, and no digests.

    What is written out stays: read back, it is the same run.
    """
    run = read(written(tmp_path, f'{LEAST}[accumulator]\ndtype = "exact"'))
    assert (1, 10, 65_536) == (run.parallel.threads, run.digest.every_steps, run.accumulator.max_microbatches)
    assert run == read(written(tmp_path, to_toml(run)), [Setting.parse("parallel.ranks=1")])
    run = read(written(tmp_path, LEAST), [Setting.parse("accumulator.dtype=float64")])
    assert (None, None) == (run.parallel.threads, run.digest.every_steps)
    asked = ("accumulator.dtype=exact", "parallel.threads=2", "digest.every_steps=3", "accumulator.max_microbatches=8")
    run = read(written(tmp_path, LEAST), [Setting.parse(each) for each in asked])
    assert (2, 3, 8) == (run.parallel.threads, run.digest.every_steps, run.accumulator.max_microbatches)


@pytest.mark.parametrize(("table", "expected"), [("ranks = 4", 2), ("ranks = 1", 2), ("ranks = 9\nreplicas = 3", 3)])
def test_hsdp_has_two_copies_unless_others_are_asked_for(tmp_path, table, expected):
    """mode = "hsdp" alone means replicas = 2; one rank is not divided by them, because the mode then means nothing."""
    run = read(written(tmp_path, f'{LEAST}[parallel]\nmode = "hsdp"\n{table}'))
    assert expected == run.parallel.replicas


def test_another_mode_takes_the_copies_out_of_the_file(tmp_path):
    """--set parallel.mode=fsdp needs no way to unset the replicas of hsdp; those that are set beside it are refused."""
    path = written(tmp_path, f'{LEAST}[parallel]\nmode = "hsdp"\nreplicas = 2\nranks = 4')
    run = read(path, [Setting.parse("parallel.mode=fsdp")])
    assert ("fsdp", None, 4) == (run.parallel.mode, run.parallel.replicas, run.parallel.ranks)
    assert 2 == read(path, [Setting.parse("parallel.mode=hsdp")]).parallel.replicas
    with pytest.raises(ConfigError, match="'fsdp' has no such key"):
        read(path, [Setting.parse("parallel.mode=fsdp"), Setting.parse("parallel.replicas=2")])
    with pytest.raises(ConfigError, match="'fsdp' has no such key"):  # what the file has wrong stays wrong
        read(written(tmp_path, f"{LEAST}[parallel]\nreplicas = 2"), [Setting.parse("parallel.mode=fsdp")])


def test_adapters_are_there_where_they_are_asked_for(tmp_path):
    """Without the table there are none, and none is written; a rank alone has defaults for the rest, and reads back."""
    run = read(written(tmp_path, LEAST))
    assert run.adapter is None
    assert "adapter" not in to_toml(run)
    run = read(
        written(tmp_path, f"{LEAST}[adapter]\nrank = 4\n[model.x]\ny = 1"), [Setting.parse("model.freeze=['a*']")]
    )
    assert (4, None, 7, 0.0) == (run.adapter.rank, run.adapter.alpha, len(run.adapter.targets), run.adapter.dropout)
    assert (("a*",), {"x": {"y": 1}}) == (run.model.freeze, run.model.arguments)
    assert run == read(written(tmp_path, to_toml(run)))


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (7, 7), (8, 8), (500, 8)])
def test_a_microbatch_is_by_default_no_larger_than_the_batch(tmp_path, rows, expected):
    """Where microbatch_size is absent it is 8, or the batch where that has fewer rows."""
    assert expected == read(written(tmp_path, f"batch_size = {rows}\n{LEAST}")).microbatch_size


def test_keys_that_a_table_does_not_know_are_arguments(tmp_path):
    """Model, data, optimizer and schedule pass their other keys on; a whole number serves where a fraction is due."""
    text = LEAST.replace("[data]", "width = 3\n[data]") + "limit = 5\n[optimizer]\nlr = 1\nbetas = [0.9, 0.95]\n"
    run = read(written(tmp_path, text))
    assert {"width": 3} == run.model.arguments
    assert {"limit": 5} == run.data.arguments
    assert {"betas": [0.9, 0.95]} == run.optimizer.arguments
    assert 1.0 == run.optimizer.lr
    assert isinstance(run.optimizer.lr, float)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("model.tag=3", 3),
        ("model.tag = 3e-4", 3e-4),
        ("model.tag=[1, 2]", [1, 2]),
        ("model.tag=true", True),
        ("model.tag='3'", "3"),
        ("model.tag=gelu", "gelu"),
        ("model.tag=a=b", "a=b"),
        ("model.tag=", ""),
        ("model.tag=1\nsteps = 7", "1\nsteps = 7"),
        ("model.tag.inner=1", {"inner": 1}),
    ],
)
def test_a_setting_is_toml_where_it_is_toml_and_text_elsewhere(tmp_path, setting, expected):
    """The value of --set is read as TOML, and taken as it stands where it is none; it never sets a second key."""
    run = read(written(tmp_path, LEAST), [Setting.parse(setting)])
    assert expected == run.model.arguments["tag"]
    assert None is run.steps


def test_the_later_setting_wins_and_tables_are_made(tmp_path):
    """--set overrides the file, the later of two wins, and a table that the file lacks is made."""
    settings = [Setting.parse(text) for text in ("batch_size=16", "batch_size=32", "step.max_norm=2")]
    run = read(written(tmp_path, f"batch_size = 8\n{LEAST}"), settings)
    assert (32, 2.0) == (run.batch_size, run.step.max_norm)


def test_steps_and_epochs_replace_each_other(tmp_path):
    """--set epochs takes the file's steps away and the other way round; both of them set is still a mistake."""
    path = written(tmp_path, f"steps = 400\n{LEAST}")
    run = read(path, [Setting.parse("epochs=3")])
    assert (None, 3) == (run.steps, run.epochs)
    assert "keep one of the two" in refusal(path, ["epochs=3", "steps=2"])
