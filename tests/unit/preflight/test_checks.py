"""Every check has a run that passes and one that does not, and only what must break fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci import preflight_page
from megatron_stability import cli
from megatron_stability.megatron.start.preflight_command import read, training_flags
from megatron_stability.preflight.checks import CHECKS, PROFILES, judge, profile_of
from megatron_stability.preflight.judges import Outcome
from megatron_stability.preflight.plan import Plan

MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --swiglu --vocab-size 128000 --bf16"
)
TRAIN = "--lr 2e-4 --train-iters 100000 --lr-warmup-iters 2000 --global-batch-size 512 --lr-decay-style cosine"
FP8 = "--fp8-format hybrid"
MOE = "--num-experts 8"
#: By check: flags under which it passes, flags under which it does not, and how that ends.
EXAMPLES = {
    "attention-logits": ("--qk-layernorm", "", "warn"),
    "output-logits": ("--stability-model-z-loss 1e-4", "", "warn"),
    "init-std": ("--init-method-std 0.01", "--init-method-std 0.1", "warn"),
    "embedding-std": ("--stability-model-init-embedding d_model", "", "warn"),
    "clip": ("--clip-grad 1.0", "--clip-grad 0", "warn"),
    "adam-beta2": ("--adam-beta2 0.95", "--adam-beta2 0.999", "warn"),
    "adam-eps": ("--adam-eps 1e-8", "--adam-eps 1e-3", "warn"),
    "weight-decay": ("--weight-decay 0.1", "--weight-decay 0", "warn"),
    "warmup": ("--lr-warmup-iters 1000", "--lr-warmup-iters 0", "warn"),
    "warmup-memory": ("--adam-beta2 0.95", "--adam-beta2 0.9999", "warn"),
    "schedule": ("--lr-decay-style cosine", "--lr-decay-style constant", "warn"),
    "width": ("--lr 2e-4", "--lr 3e-3", "warn"),
    "precision": ("", "--fp16 --loss-scale 1", "fail"),
    "gradient-sums": ("", "NOT --bf16 --fp16", "warn"),
    "masters": ("", "--use-precision-aware-optimizer --main-params-dtype fp16", "warn"),
    "fp8-active": (FP8, f"{FP8} --transformer-impl local", "fail"),
    "fp8-history": (f"{FP8} --fp8-amax-history-len 1024 --fp8-amax-compute-algo max", FP8, "warn"),
    "fp8-ends": (f"{FP8} --first-last-layers-bf16", FP8, "warn"),
    "router-z": (f"{MOE} --moe-z-loss-coeff 1e-3", MOE, "warn"),
    "balance": (f"{MOE} --moe-aux-loss-coeff 1e-2", f"{MOE} --moe-router-load-balancing-type none", "warn"),
    "non-finite": ("", "--stability-mode off --no-check-for-nan-in-loss-and-grad", "fail"),
    "divergence": ("--stability-decide-preset field", "", "warn"),
    "batches": ("", "--stability-observe-batch-enabled false", "warn"),
    "held-out": ("--eval-iters 10 --eval-interval 500 --multiple-validation-sets", "--eval-iters 0", "warn"),
    "logging": ("--tensorboard-dir tb --log-interval 1", "--tensorboard-dir tb --log-interval 100", "warn"),
    "detectors": ("--stability-observe-attention-enabled true", "", "warn"),
    "throughput": ("--log-throughput", "", "warn"),
    "saves": ("--save c --save-interval 500", "", "warn"),
    "storage": ("--save c --save-interval 50000", "FULL --save c --save-interval 500", "fail"),
    "signals": ("--exit-signal-handler", "", "warn"),
    "requeue": ("--save c --load c", "--save c", "warn"),
    "network": ("ENV", "", "warn"),
}


def plan_of(flags: str) -> Plan:
    words, model = flags.split(), MODEL
    free, environment = 10**15, {}
    if words[:1] == ["NOT"]:
        model = MODEL.replace(words[1], "")
        words = words[2:]
    if words[:1] == ["FULL"]:
        free, words = 10**11, words[1:]
    if words[:1] == ["ENV"]:
        environment, words = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, words[1:]
    found, unknown = read([*model.split(), *TRAIN.split(), *words])
    assert unknown == []
    return Plan(found.args, found.config, environment, free)


def test_every_check_has_its_examples() -> None:
    assert list(EXAMPLES) == list(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_run_that_passes_and_one_that_does_not(name: str) -> None:
    good, bad, ends = EXAMPLES[name]
    assert judge(plan_of(good))[name].outcome is Outcome.PASS, judge(plan_of(good))[name]
    found = judge(plan_of(bad))[name]
    assert found.outcome.value == ends, found


def test_under_muon_unbounded_logits_fail() -> None:
    assert judge(plan_of("--optimizer muon"))["attention-logits"].outcome is Outcome.FAIL
    for way in ("--qk-layernorm", "--qk-clip", "--stability-qk-clip-enabled true", "--stability-model-qk-norm rmsnorm"):
        assert judge(plan_of(f"--optimizer muon {way}"))["attention-logits"].outcome is Outcome.PASS
    observing = plan_of("--optimizer muon --stability-qk-clip-enabled true --stability-mode observe")
    assert judge(observing)["attention-logits"].outcome is Outcome.FAIL, "a clip that is only observed bounds nothing"


@pytest.mark.parametrize(
    ("flags", "profile"),
    [
        ("", "dense-bf16"),
        (FP8, "dense-fp8"),
        (MOE, "moe"),
        ("--optimizer muon", "muon"),
        ("--stability-fp8-emulate current", "dense-fp8"),
    ],
)
def test_the_kind_of_run_follows_from_its_flags(flags: str, profile: str) -> None:
    assert profile_of(plan_of(flags)) == profile
    assert profile in PROFILES


def test_weights_are_those_of_known_models() -> None:
    llama = "--group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --untie-embeddings-and-output-weights"
    assert plan_of(f"{llama} --vocab-size 128256").weights == pytest.approx(8.03e9, rel=0.005)
    mixtral = f"{llama} --vocab-size 32000 --num-experts 8"
    assert plan_of(mixtral).weights == pytest.approx(46.7e9, rel=0.005)
    assert plan_of(f"{llama} --vocab-size 128256").checkpoint_bytes == pytest.approx(112.4e9, rel=0.005)


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", "--lr", "1e-3"],
        ["srun", "python", "-u", "/m/pretrain_gpt.py", "--lr=1e-3"],
        ["megatron-stability", "pretrain", "--nproc", "2", "--cpu", "--lr", "1e-3"],
        ["run", "x/pretrain_gpt.py", "--lr", "1e-3"],
        ["--lr", "1e-3"],
    ],
)
def test_flags_are_found_in_any_launchers_line(command: list[str]) -> None:
    plan, unknown = read(training_flags(command))
    assert plan["lr"] == 1e-3
    assert unknown == []


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["--", "pretrain", *MODEL.split(), *TRAIN.split(), "--save", str(tmp_path / "new"), "--their-own", "3"]
    assert cli.main(["preflight", "--json", *line]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert told["profile"] == "dense-bf16"
    assert told["unknown_flags"] == ["--their-own"]
    assert "fp8-ends" not in told["checks"]
    assert told["checks"]["clip"]["outcome"] == "pass"
    assert cli.main(["preflight", "--", "pretrain", *MODEL.split(), "--optimizer", "muon"]) == 1
    shown = capsys.readouterr().out
    assert shown.index("FAIL attention-logits") < shown.index("WARN output-logits")
    assert "PASS" not in shown
    assert cli.main(["preflight", "--", "pretrain", "--qk-layernorm", *MODEL.split()]) == 0


@pytest.mark.parametrize(
    "argv", [["preflight"], ["preflight", "--", "pretrain"], ["preflight", "--", "pretrain", "--stability-mode", "akt"]]
)
def test_bad_input(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_page_is_what_the_table_says() -> None:
    assert preflight_page.main("--check") == 0
