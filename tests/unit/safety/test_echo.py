"""What is repeated of a value: short, plain, and no secret, in every artefact that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_stability import echo
from megatron_stability.checkpoints import generations, run_state
from megatron_stability.checkpoints.run_state import RunState
from megatron_stability.config import Record
from megatron_stability.errors import UsageError
from megatron_stability.ledger.bundle import Bundles, Context, plain_args
from megatron_stability.ledger.ledger import Ledger, RunInfo
from megatron_stability.records import Action, Decision, StepRecord
from megatron_stability.report import command
from tests.unit.checkpoints.checkpoint_maker import complete

PLANTED = {
    "WANDB_API_KEY": "b1946ac92492d2347c6235b4d2611184",
    "SITE_CREDENTIALS": "correct horse battery",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEX",
    "MY_THING": "u7Yq-55xAmZp0",  # named like nothing, and looks like one
}
HARMLESS = {
    "SEED_KEY": "123456789012345",
    "TOKEN_DIR": "/data/tokens/of/the/run",
    "KEY_VERSION": "2024.10.11.12",
    "SLURM_JOB_NAME": "llama-pretraining-7",
    "AUTH": "short",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**PLANTED, **HARMLESS}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(
            (name, True)
            for name in ("logger.comet_api_key", "hfToken", "DB-PASSWORD", "aws_secret_access_key", "token")
        ),
        *((name, True) for name in ("credentials", "wandb.apikey", "private_key_text", "Authorization", "hf_token")),
        *((name, False) for name in ("eod_token", "jsonl_key", "num_tokens", "tokenizer_model", "fim_pad_token")),
        *((name, False) for name in ("moe_token_dispatcher_type", "linear_num_key_heads", "", "keys", "monkey")),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert echo.is_secret_name(name) is secret


def test_secrets_are_masked_at_any_depth_and_nothing_else() -> None:
    tree = {
        "logger": {"comet_api_key": "x1", "project": "p", "tags": ["a", PLANTED["MY_THING"]]},
        "url": f"https://me:pass@host/{PLANTED['WANDB_API_KEY']}/x",
        "credentials": {"user": "me", "pin": 1234},
        "lr": 1e-3,
        "flag": True,
        "use_token": True,
        "eod_token": "<eod>",
        "paths": ("/data", HARMLESS["TOKEN_DIR"], None),
        "words": f"hf_token=abc lr=3 password = 'p q' {HARMLESS['SLURM_JOB_NAME']}",
    }
    assert echo.masked(tree) == {
        "logger": {"comet_api_key": "***", "project": "p", "tags": ["a", "***"]},
        "url": "https://me:***@host/***/x",
        "credentials": {"user": "***", "pin": "***"},
        "lr": 1e-3,
        "flag": True,
        "use_token": True,
        "eod_token": "<eod>",
        "paths": ("/data", HARMLESS["TOKEN_DIR"], None),
        "words": f"hf_token=*** lr=3 password = *** {HARMLESS['SLURM_JOB_NAME']}",
    }
    assert list(echo.secret_names(tree)) == ["logger.comet_api_key", "logger.tags", "url", "credentials", "words"]


@pytest.mark.parametrize("value", [*HARMLESS.values(), "True", "no", "0.1", "act", "detect.loss_spike"])
def test_numbers_paths_versions_and_switches_are_no_secrets(value: str) -> None:
    assert echo.masked({"value": value, "text": f"a {value} b"}) == {"value": value, "text": f"a {value} b"}


def test_a_sentence_is_short_plain_and_without_secrets() -> None:
    said = str(UsageError(f"a\x1b[2Jb\u202ec\x9b {PLANTED['SITE_CREDENTIALS']} api_key={'k' * 5} " + "x" * 100_000))
    assert said.startswith("a\\x1b[2Jb\\u202ec\\x9b *** api_key=*** xxx")
    assert "(100,0" in said
    assert len(said) < echo.LONGEST
    assert str(UsageError("two\nlines\tstay, and ü")) == "two\nlines\tstay, and ü"


def test_a_repr_is_bounded_whatever_it_is_of() -> None:
    inner: list[object] = ["x" * 10]
    for _ in range(30):
        inner = [inner] * 9
    for value in (inner, "y" * 10**7, 10**100_000, {str(i): i for i in range(10**5)}, b"z" * 10**6, set(range(10**5))):
        assert len(echo.brief(value)) < 3000


def test_no_artefact_of_a_run_holds_a_planted_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ledger, bundle, state, suspect, report and what the command says; each is given every secret in every place."""
    everything = " ".join(PLANTED.values())
    reason = f"the data at {everything} went bad, comet_api_key=planted-by-name"
    args = {"logger.comet_api_key": "planted-by-name", "data_path": [everything], "thing": PLANTED["MY_THING"], "lr": 1}
    info = RunInfo(mode="act", versions={"x": everything}, layout={}, data={"data_path": everything})
    folder = tmp_path / "run"
    with Ledger.open(folder, resume_step=0, resume_sample=0, run_info=info) as ledger:
        context = Context(versions={"x": everything}, args=plain_args(args))
        sinks = (ledger, Bundles(folder, limits=Record(), context=context, generation=lambda: 1))
        for step, action in enumerate((Action.APPLY, Action.SKIP, Action.HALT), start=1):
            record = StepRecord(step=step, first_sample=8 * (step - 1), samples=8, tokens=64.0, loss=2.0, grad_norm=1.0)
            for sink in sinks:
                sink.write(record, Decision(step=step, action=action, advised=action, reason=reason))
        ledger.rewind(2, 16, reason)
        ledger.ending(2, 18, reason)
    run_state.write(folder, RunState(status="halt", reason=reason, pass_over={"windows": [], "why": reason}))
    generations.mark_suspect(complete(tmp_path, 5), reason)
    assert command.run([str(folder), "--out", str(tmp_path / "r.html"), "--names", everything]) == 0
    error = UsageError(reason)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in written}
    assert names >= {"ledger.jsonl", "incident.json", "state.json", "stability_suspect.json", "r.html"}
    for text in [path.read_bytes().decode(errors="replace") for path in written] + [*capsys.readouterr(), str(error)]:
        whole = json.dumps(text) + text
        for secret in [value for name, value in PLANTED.items() if name != "MY_THING"]:
            assert secret not in whole
        assert "planted-by-name" not in whole
    bundle = next(path for path in written if path.name == "incident.json").read_text()
    assert PLANTED["MY_THING"] not in json.loads(bundle)["context"]["args"].values()
    assert json.loads(bundle)["context"]["args"]["lr"] == 1


def test_what_is_measured_a_token_stays() -> None:
    """The state of a policy has a window of seconds a token; masked, it could not be loaded again."""
    state = {"gate": {"seconds a token": {"values": [0.5]}, "seconds_per_token": [1.0]}}
    assert echo.masked(state) == state


def test_key_equals_value_speaks_of_a_form() -> None:
    assert echo.masked_text("'model.num_layers' is not key=value") == "'model.num_layers' is not key=value"
    assert echo.masked_text("api_key=abc") == "api_key=***"
