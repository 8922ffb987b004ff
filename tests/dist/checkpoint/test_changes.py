"""What a run that resumes may do otherwise than the one that saved, judged on a rank; no training."""

from __future__ import annotations

import re
from argparse import Namespace
from functools import partial
from typing import Any

import pytest

from megatron_stability.checkpoints.manifest import Manifest
from megatron_stability.errors import UsageError
from tests.dist.checkpoint.files_read import DATA, Read, data_file
from tests.dist.pool import Context, Pool

pytestmark = pytest.mark.megatron
TRAINING = {"lr": 0.001, "seed": 1, "data_path": ["a"]}

START = {"finetune": False, "skip_train": False, "no_load_optim": False, "use_checkpoint_opt_param_scheduler": False}


def refuse(
    context: Context,
    saved: dict[str, Any],
    now: dict[str, Any],
    files: Read,
    tree: dict[str, Any],
    release: str = "0.19.2",
) -> str | None:
    from megatron_stability.config import StabilityConfig
    from megatron_stability.megatron.checkpoint.resume import changes

    known: dict[str, Any] = {"training": saved, "versions": {"megatron_core": release}} | Read(DATA).known()
    try:
        changes.refuse(
            Manifest(step=5, samples=5, tokens=5, **known),
            Namespace(**(START | now)),
            files,  # type: ignore[arg-type]
            StabilityConfig.model_validate(tree),
        )
    except UsageError as error:
        return str(error)
    return None


def allowed(context: Context, saved: dict[str, Any], now: dict[str, Any], names: list[str]) -> tuple[str, ...]:
    from megatron_stability.config import StabilityConfig
    from megatron_stability.megatron.checkpoint.resume import changes

    known: dict[str, Any] = {"training": saved, "versions": {"megatron_core": "0.19.2"}} | Read(DATA).known()
    manifest = Manifest(step=5, samples=5, tokens=5, **known)
    config = StabilityConfig.model_validate({"checkpoint": {"allow_changes": names}})
    return changes.refuse(manifest, Namespace(**(START | now)), Read(DATA), config)  # type: ignore[arg-type]


def test_what_is_allowed_and_differs_is_named_for_its_grace(patched_ranks: Pool) -> None:
    now = TRAINING | {"seed": 2, "log_interval": 7}
    assert patched_ranks.run(allowed, TRAINING, now, ["seed", "lr"], world=1) == [("seed",)]


def ask_changes(
    pool: Pool, now: dict[str, Any], allowed: tuple[str, ...] = (), saved: dict[str, Any] | None = None, **more: Any
) -> str | None:
    tree = more.pop("tree", {}) | {"checkpoint": {"allow_changes": allowed}}
    files = more.pop("files", Read(DATA))
    release = more.pop("release", "0.19.2")
    assert not more
    answer: str | None
    (answer,) = pool.run(refuse, TRAINING | (saved or {}), TRAINING | now, files, tree, release, world=1)
    return answer


def test_changes_are_listed_and_refused_unless_named(patched_ranks: Pool) -> None:
    ask = partial(ask_changes, patched_ranks)
    assert ask({}) is None
    said = ask({"clip_grad": 0.5, "seed": 2}, saved={"clip_grad": 1.0})
    assert said is not None
    assert re.search(r"clip_grad 1\.0 -> 0\.5; seed 1 -> 2; .*allow-changes clip_grad,seed$", said)
    assert "seed" in (ask({"clip_grad": 0.5, "seed": 2}, ("clip_grad",), {"clip_grad": 1.0}) or "")
    assert ask({"clip_grad": 0.5, "seed": 2}, ("clip_grad", "seed"), {"clip_grad": 1.0}) is None
    assert "tokenizer 'files t' -> 'files u'" in (ask({}, files=Read(DATA, "u")) or "")
    other = Read((DATA[0], data_file("b", "3")))
    assert "dataset (b.bin has other content)" in (ask({}, files=other) or ""), "Megatron-LM#725, #1343"
    assert ask({}, ("dataset",), files=other) is None
    assert ask({"log_interval": 7, "tensor_model_parallel_size": 2}, saved={"tensor_model_parallel_size": 1}) is None


def test_numerics_of_megatron_and_of_ours_are_refused_with_both_values(patched_ranks: Pool) -> None:
    """MarinFold#198: a run resumed without the softcap that it was trained with."""
    ask = partial(ask_changes, patched_ranks)
    assert "rotary_base 10000 -> 5000" in (ask({"rotary_base": 5000}, saved={"rotary_base": 10000}) or "")
    softcap = {"model.final_softcap": 30.0}
    assert "model.final_softcap 30.0 -> None" in (ask({}, saved=softcap) or "")
    assert ask({}, ("final_softcap",), softcap) is ask({}, ("model.final_softcap",), softcap) is None
    assert "model.z_loss 0.0 -> 0.0001" in (ask({}, tree={"model": {"z_loss": 1e-4}}) or "")  # older manifests
    assert "qk_clip.tau" in (ask({}, tree={"qk_clip": {"tau": 30.0}}) or "")


def test_what_the_checkpoint_lacks_has_its_releases_default(patched_ranks: Pool) -> None:
    ask = partial(ask_changes, patched_ranks)
    assert ask({"muon_tp_mode": "blockwise"}, release="0.18.2") is None
    said = ask({"muon_tp_mode": "duplicated"}, release="0.18.2") or ""
    assert "muon_tp_mode 'blockwise' -> 'duplicated' (the checkpoint does not say" in said
    assert "moe_aux_loss_coeff 0.01 -> 0.0" in (ask({}, saved={"moe_aux_loss_coeff": 0.01}) or "")
    assert ask({"ffn_hidden_size": 256}) is None  # Megatron's own: no default says what it was


def test_a_forks_own_argument_is_refused_where_a_configuration_has_it(patched_ranks: Pool) -> None:
    ask = partial(ask_changes, patched_ranks)
    assert ask({"our_cluster": "b"}, saved={"our_cluster": "a"}) is None
    assert "hetereogenous_dist_checkpoint False -> True" in (ask({"hetereogenous_dist_checkpoint": True}) or "")


def test_an_evaluation_has_to_have_the_model_only_and_a_new_run_nothing(patched_ranks: Pool) -> None:
    ask = partial(ask_changes, patched_ranks)
    changed = {"split": "0,100,0", "rotary_base": 5000}
    before = {"split": "98,1,1", "rotary_base": 10000}
    said = ask(changed | {"skip_train": True}, saved=before) or ""
    assert "rotary_base" in said
    assert "split" not in said
    assert ask(changed | {"finetune": True}, saved=before) is None


def test_a_new_schedule_needs_megatrons_word_for_whose_it_is(patched_ranks: Pool) -> None:
    ask = partial(ask_changes, patched_ranks)
    assert re.search(r"allow-changes lr and --override-opt_param-scheduler", ask({"lr": 0.002}) or "")
    assert re.search(r"give --override-opt_param-scheduler", ask({"lr": 0.002}, ("lr",)) or "")
    assert ask({"lr": 0.002, "override_opt_param_scheduler": True}, ("lr",)) is None
