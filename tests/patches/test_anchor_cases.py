"""Seams by anchor in trees that differ: placed where they belong, or refused with the reason and nothing written."""

from __future__ import annotations

import re

import pytest

from megatron_stability.errors import UsageError
from megatron_stability.megatron.patching import on_disk
from megatron_stability.megatron.patching.anchor.place import State
from megatron_stability.megatron.patching.survey import survey
from megatron_stability.megatron.patching.tree import State as TreeState
from tests.patches.patch_tools import contents
from tests.patches.small_megatron import (
    ARGUMENTS,
    CHECKPOINTING,
    FILES,
    GPT,
    LANGUAGE,
    OPTIMIZER,
    SPECS,
    TRAINING,
    small_megatron,
)

# --- what is different and still has its place ------------------------------------------------------------------

STEP = "    update_successful, grad_norm, num_zeros_in_grad = optimizer.step()\n"
UNDER_SPAN = f"    with span('optimizer') as it:\n    {STEP}        it.end(update_successful)\n"
TRAIN_STEP_CALL = FILES[TRAINING][
    FILES[TRAINING].index("            (\n                loss_dict") : FILES[TRAINING].index(
        "        if should_checkpoint:"
    )
]
WRITE = FILES[CHECKPOINTING][
    FILES[CHECKPOINTING].index("            async_save_request = dist") : FILES[CHECKPOINTING].index(
        "    if ckpt_type != "
    )
]


def indented(text: str, level: str = "    ") -> str:
    return "".join(level + line if line.strip() else line for line in text.splitlines(keepends=True))


PLACED: dict[str, tuple[str, str, str, str]] = {
    "the step inside a span": (
        TRAINING,
        STEP,
        UNDER_SPAN,
        f"    with span('optimizer') as it:\n    {STEP}        if seams is not None:\n"
        "            seams.update_done(update_successful)\n        it.end(update_successful)\n",
    ),
    "the whole step of the loop inside a span": (
        TRAINING,
        TRAIN_STEP_CALL,
        "            with span('step') as step_span:\n" + indented(TRAIN_STEP_CALL),
        "                    inject(args.fault)\n                if seams is not None:\n"
        "                    should_checkpoint, should_exit, exit_code = seams.exit_after_step(\n",
    ),
    "the save inside a span": (
        CHECKPOINTING,
        WRITE,
        "            with span('write'):\n" + indented(WRITE),
        "                async_save_request = (dist_checkpointing.save if seams is None else "
        "seams.checkpoint_write(dist_checkpointing.save))(\n",
    ),
    "the import joined with another": (
        CHECKPOINTING,
        "from megatron.core import dist_checkpointing\n",
        "from megatron.core import (\n    dist_checkpointing,\n    mpu,\n)\n",
        "    mpu,\n)\nfrom megatron.core.stability import seams\n",
    ),
    "another argument of the save": (
        CHECKPOINTING,
        "                checkpoint_name,\n",
        "                checkpoint_name,\n                ours,\n",
        "seams.checkpoint_write(dist_checkpointing.save))(",
    ),
    "a statement between step and timer": (
        TRAINING,
        STEP,
        f"    watch(optimizer)\n{STEP}    watch(None)\n",
        f"{STEP}    if seams is not None:\n        seams.update_done(update_successful)\n    watch(None)\n",
    ),
    "other quotes and a joined string": (
        TRAINING,
        "f' validation{suffix} loss at {prefix} | '",
        '(f" validation{suffix} loss"\n            f" at {prefix} | ")',
        "seams.evaluated(suffix, total_loss_dict)\n        string = (",
    ),
    "an exit moved to a helper of the load": (
        CHECKPOINTING,
        "    if checkpoint_version > 3:\n        sys.exit()\n",
        "    if checkpoint_version > 3:\n        raise ValueError(checkpoint_version)\n",
        "def fix_query_key_value_ordering(model, checkpoint_version):\n    if checkpoint_version > 3:\n        raise",
    ),
    "a wrapper around the whole step function": (
        TRAINING,
        "def train_step(",
        "@traced('step', level=2)\ndef train_step(",
        "@traced('step', level=2)\ndef train_step(",
    ),
}


@pytest.mark.parametrize("case", PLACED)
def test_placed_where_it_belongs(tmp_path, case):
    path, old, new, expected = PLACED[case]
    assert FILES[path].count(old) == 1
    root = small_megatron(tmp_path / "clone", {path: FILES[path].replace(old, new)})
    stock = contents(root)
    assert on_disk.apply(root).state is TreeState.NOT_APPLIED
    patched = (root / path).read_text()
    assert expected in patched
    compile(patched, path, "exec")
    assert on_disk.apply(root).state is TreeState.APPLIED
    on_disk.revert(root)
    assert contents(root) == stock


# --- what is refused --------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str, str, str, str, str]] = {
    "the step in a helper": (
        TRAINING,
        STEP,
        "    update_successful, grad_norm, num_zeros_in_grad = ours(optimizer)\n",
        "update_done",
        State.GONE,
        r"train_step holds no `optimizer\.step\(\)`$",
    ),
    "the step in a helper of the same file": (
        TRAINING,
        f"{STEP}    log",
        "    update_successful, grad_norm, num_zeros_in_grad = ours(optimizer)\n    log",
        "update_done",
        State.GONE,
        r"train_step holds no .*; it stands in ours \(line \d+\)",
    ),
    "the step twice": (TRAINING, STEP, STEP * 2, "update_done", State.CHANGED, "at lines 23 and 24"),
    "another name for the outcome": (
        TRAINING,
        STEP,
        STEP.replace("update_successful", "ok"),
        "update_done",
        State.CHANGED,
        "`update_successful`, which the seam reads, is not set on every path",
    ),
    "the step in an if": (
        TRAINING,
        STEP,
        f"    if args.ours:\n    {STEP}",
        "update_done",
        State.CHANGED,
        r"it stands under `if args\.ours`, expected `train_step`",
    ),
    "the step in a try": (
        TRAINING,
        STEP,
        f"    try:\n    {STEP}    finally:\n        done()\n",
        "update_done",
        State.CHANGED,
        "it stands under `try`",
    ),
    "the step in a loop": (
        TRAINING,
        STEP,
        f"    for optimizer in model:\n    {STEP}",
        "update_done",
        State.CHANGED,
        "it stands under `for optimizer in model`",
    ),
    "the losses of some paths only": (
        TRAINING,
        "        losses_reduced = forward(data_iterator, model)\n",
        "        if args.ours:\n            losses_reduced = forward(data_iterator, model)\n",
        "losses_ready",
        State.CHANGED,
        "`losses_reduced`, which the seam reads",
    ),
    "losses deleted again": (
        TRAINING,
        "    # Update parameters.\n",
        "    del losses_reduced\n",
        "losses_ready",
        State.CHANGED,
        "`losses_reduced`, which the seam reads",
    ),
    "the step function renamed": (
        TRAINING,
        "def train_step(forward",
        "def our_step(forward",
        "step_begins",
        State.GONE,
        r"there is no train_step; it stands in our_step \(line 14\)",
    ),
    "timer before the forward": (
        TRAINING,
        "    while rerun_state_machine.should_run_forward_backward(data_iterator):\n"
        "        losses_reduced = forward(data_iterator, model)\n",
        "    losses_reduced = forward(data_iterator, model)\n"
        "    timers('optimizer', log_level=1).start(barrier=True)\n"
        "    while rerun_state_machine.should_run_forward_backward(data_iterator):\n        pass\n",
        "losses_ready",
        State.CHANGED,
        "at lines",
    ),
    "another outcome of the step function": (
        TRAINING,
        "num_zeros_in_grad, log_max_attention_logit\n",
        "num_zeros_in_grad, log_max_attention_logit, None\n",
        "passes_over",
        State.CHANGED,
        "holds no `return {}, skipped_iter, .*on which the seam relies",
    ),
    "a global name made local": (
        TRAINING,
        "            if args.fault:\n",
        "            if args.ours:\n                get_num_microbatches = args.ours\n            if args.fault:\n",
        "rewound",
        State.CHANGED,
        "`get_num_microbatches`, which the seam reads",
    ),
    "a name set behind": (
        TRAINING,
        "    start_iteration = iteration\n",
        "    if args.ours:\n        start_iteration = iteration\n",
        "rewound",
        State.CHANGED,
        "`start_iteration`, which the seam sets, is not set on every path before",
    ),
    "a name that a loop alone sets": (
        TRAINING,
        "    start_iteration = iteration\n",
        "    for start in args.ours:\n        start_iteration = start\n",
        "rewound",
        State.CHANGED,
        "`start_iteration`, which the seam sets, is not set on every path before",
    ),
    "seams means something else": (
        TRAINING,
        "    args = get_args()\n    iteration = args.iteration\n",
        "    args = get_args()\n    seams = args.seams\n    iteration = args.iteration\n",
        "train_begins",
        State.CHANGED,
        "train has a name `seams` of its own",
    ),
    "seams means something else in the module": (
        SPECS,
        "from typing import Any\n",
        "from typing import Any\nfrom ours import seams\n",
        "import in spec_utils.py",
        State.CHANGED,
        "the module has a name `seams` already",
    ),
    "a name of ours is taken": (
        LANGUAGE,
        "        labels = labels.transpose(0, 1)\n",
        "        labels = labels.transpose(0, 1)\n        own_loss = labels\n",
        "language_model_loss",
        State.CHANGED,
        "`own_loss`, which the seam sets, is not set on every path before",
    ),
    "another name for the logits": (
        LANGUAGE,
        "self, labels, logits):",
        "self, labels, outputs):",
        "language_model_loss",
        State.CHANGED,
        "`logits`, which the seam reads",
    ),
    "the body on the line of its if": (
        GPT,
        "        if labels is None:\n            # [s b h] => [b s h]\n            return logits.transpose(0, 1)\n",
        "        if labels is None: return logits.transpose(0, 1)\n",
        "final_logits",
        State.CHANGED,
        "it shares its line with another statement",
    ),
    "two statements on a line": (
        CHECKPOINTING,
        "    model = unwrap_model(ddp_model)\n",
        "    model = unwrap_model(ddp_model); ours(model)\n",
        "load_begins",
        State.CHANGED,
        "it shares its line with another statement",
    ),
    "the update in a helper": (
        OPTIMIZER,
        "        success = self.step_with_ready_grads()\n        return success, grad_norm, None\n\n\nclass FP32",
        "        return self.ours(grad_norm)\n\n    def ours(self, grad_norm):\n"
        "        return self.step_with_ready_grads(), grad_norm, None\n\n\nclass FP32",
        "update_allowed in MixedPrecisionOptimizer",
        State.GONE,
        r"it stands in MixedPrecisionOptimizer\.ours",
    ),
    "the update before the norm": (
        OPTIMIZER,
        "        grad_norm = self.clip()\n        success = self.step_with_ready_grads()\n",
        "        success = self.step_with_ready_grads()\n        grad_norm = self.clip()\n",
        "update_allowed in MixedPrecisionOptimizer",
        State.CHANGED,
        "`grad_norm`, which the seam reads",
    ),
    "the update twice in a line": (
        OPTIMIZER,
        "False if should_skip_update else self.step_with_ready_grads()",
        "self.step_with_ready_grads() and self.step_with_ready_grads()",
        "step_with_ready_grads in ChainedOptimizer",
        State.CHANGED,
        "it holds `self.step_with_ready_grads\\(\\)` 2 times",
    ),
    "a class renamed": (
        OPTIMIZER,
        "class FP32Optimizer",
        "class PlainOptimizer",
        "update_allowed in FP32Optimizer",
        State.GONE,
        r"there is no FP32Optimizer\.step; it stands in .*PlainOptimizer\.step",
    ),
    "another exception's name": (
        CHECKPOINTING,
        "except Exception as e:",
        "except Exception as error:",
        "strict_load_failed",
        State.CHANGED,
        "`e`, which the seam reads",
    ),
    "a string over lines under the tracker": (
        CHECKPOINTING,
        "                f.write('release' if release else str(iteration))\n",
        "                f.write('release' if release else str(iteration))\n                f.write('''a\n  b''')\n",
        "moves_tracker",
        State.CHANGED,
        "a string in it goes on over several lines",
    ),
    "the save before the checkpoint's folder is known": (
        CHECKPOINTING,
        "    save_dir = args.save\n",
        "    if args.save:\n        save_dir = args.save\n",
        "checkpoint_saved",
        State.CHANGED,
        "`save_dir`, which the seam reads",
    ),
    "arguments set elsewhere": (
        ARGUMENTS,
        "    set_global_variables(args)\n",
        "    ours.remember(args)\n",
        "arguments_ready",
        State.GONE,
        r"holds no `set_global_variables\(args, \.\.\.\)`",
    ),
    "loads before the version is set": (
        CHECKPOINTING,
        "    model = unwrap_model(ddp_model)\n\n    state_dict = _load_base_checkpoint(load_dir)\n"
        "    set_checkpoint_version(state_dict.get('checkpoint_version', 0))\n",
        "    state_dict = _load_base_checkpoint(load_dir)\n"
        "    set_checkpoint_version(state_dict.get('checkpoint_version', 0))\n    model = unwrap_model(ddp_model)\n",
        "load_checkpoint_state",
        State.CHANGED,
        "it stands before load_begins",
    ),
    "no Python any more": (GPT, "class GPTModel:", "class GPTModel(:", "final_logits", State.CHANGED, "is no Python"),
    "old line ends": (GPT, "class GPTModel:\n", "class GPTModel:\r", "final_logits", State.CHANGED, "carriage return"),
}
HELPER = "\n\ndef ours(optimizer):\n    return optimizer.step()\n"


@pytest.mark.parametrize("case", REFUSED)
def test_refused_and_nothing_written(tmp_path, case):
    path, old, new, name, state, reason = REFUSED[case]
    assert FILES[path].count(old) >= 1
    text = FILES[path].replace(old, new, 1)
    if "of the same file" in case:
        text += HELPER
    root = small_megatron(tmp_path / "clone", {path: text})
    before = contents(root)
    row = next(row for row in survey(root).rows if row.seam == name)
    assert row.state == state
    assert re.search(reason, row.reason), row.reason
    for act in (on_disk.apply, on_disk.revert):
        with pytest.raises(UsageError, match=re.escape(path) + ".*nothing was changed"):
            act(root)
    assert contents(root) == before
