"""What Megatron takes from Apex: each state of the package, and what Megatron itself then binds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.megatron
ROOT = Path(__file__).resolve().parents[3]

# The names that Megatron imports, as empty stand-ins; importing `poison` fails the test.
NVIDIA = {
    "apex/__init__.py": "",
    "apex/multi_tensor_apply/__init__.py": "multi_tensor_applier = None",
    "apex/optimizers/__init__.py": "class FusedAdam: pass\nclass FusedSGD: pass",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": "class FusedLayerNormAffineFunction: pass",
    "apex/contrib/__init__.py": "",
    "apex/contrib/layer_norm/__init__.py": "",
    "apex/contrib/layer_norm/layer_norm.py": "import fast_layer_norm\nclass FastLayerNormFN: pass",
    "amp_C.py": "def multi_tensor_l2norm(): pass\ndef multi_tensor_scale(): pass",
    "fast_layer_norm.py": "",
    "fused_weight_gradient_mlp_cuda.py": "",
}
OTHER = {"apex/__init__.py": "", "apex/lib/__init__.py": ""}
STATES = {"absent": {}, "nvidia": NVIDIA, "other": OTHER}


def place(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def ask(folder, code):
    """What `code` prints as JSON in a process of its own, which has `folder` on its path."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(folder)!r}]\n{code}"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


TABLE = """
import json
from megatron_stability.megatron.access import apex
rows = {row.feature: [row.taken, row.usable] for row in apex.status()}
loaded = sorted({"apex", "amp_C", "torch", "megatron", "transformer_engine"} & set(sys.modules))
print(json.dumps([apex.state().name, rows, apex.line(), loaded]))
"""

# What Megatron bound, by the names of the table.
BOUND = """
import json
from megatron.core import optimizer, transformer
from megatron.core.optimizer import clip_grads
from megatron.core.fusions import fused_layer_norm
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig

def name(thing):
    return f"{thing.__module__}.{thing.__qualname__}"

def norm_builds():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    try:
        gpt_layer_specs.LNImpl(config=config, hidden_size=8)
    except ValueError:
        return False
    return True

print(json.dumps({
    "FusedAdam": name(optimizer.Adam), "FusedSGD": name(optimizer.SGD),
    "multi_tensor_l2norm": name(clip_grads.l2_norm_impl),
    "multi_tensor_scale": name(clip_grads.multi_tensor_scale_impl),
    "norm": name(gpt_layer_specs.LNImpl), "norm_builds": norm_builds(),
    "persistent": fused_layer_norm.HAVE_PERSIST_LAYER_NORM, "fusion": layers._grad_accum_fusion_available,
}))
"""


@pytest.mark.parametrize("state", ["absent", "nvidia", pytest.param("other", marks=pytest.mark.rare)])
def test_the_table_says_what_megatron_binds(tmp_path, state):
    place(tmp_path, STATES[state])
    seen_state, rows, _, loaded = ask(tmp_path, TABLE)
    bound = ask(tmp_path, BOUND)
    assert seen_state == state.upper()
    assert loaded == [], "detection must import nothing"
    taken = {feature: row[0].rpartition(".")[2] for feature, row in rows.items()}
    for feature in ("FusedAdam", "FusedSGD", "multi_tensor_l2norm", "multi_tensor_scale"):
        assert taken[feature] == bound[feature].rpartition(".")[2], feature
    norm, usable = rows["local-spec LayerNorm"]
    assert (norm == bound["norm"]) == (state != "absent")
    assert bound["norm"].endswith("WrappedTorchNorm") == (state == "absent")
    assert usable == bound["norm_builds"]
    assert (taken["persistent LayerNorm"] != "none") == bound["persistent"]
    assert rows["gradient accumulation fusion"][1] == bound["fusion"]


def test_the_line_names_the_state_and_every_fallback(tmp_path):
    place(tmp_path, OTHER)
    _, rows, line, _ = ask(tmp_path, TABLE)
    assert line.startswith("NVIDIA Apex: another package of that name. ")
    assert all(f"{feature}: {taken}" in line for feature, (taken, _) in rows.items())
    assert "uninstall it" in line
    assert "\n" not in line


def test_a_broken_apex_is_named_without_being_loaded(tmp_path):
    place(tmp_path, dict.fromkeys(NVIDIA, "raise SystemExit('loaded')"))
    state, rows, _, loaded = ask(tmp_path, TABLE)
    assert (state, loaded) == ("NVIDIA", [])
    assert rows["FusedAdam"] == ["apex.optimizers.FusedAdam", True]


def test_apex_without_its_kernels_keeps_local_norms_and_marks_the_optimizer(tmp_path):
    place(tmp_path, {name: text for name, text in NVIDIA.items() if name.startswith("apex/")})
    _, rows, _, _ = ask(tmp_path, TABLE)
    assert rows["FusedAdam"] == ["apex.optimizers.FusedAdam", False]
    assert rows["multi_tensor_l2norm"] == ["megatron.core.utils.local_multi_tensor_l2_norm", True]
    assert rows["persistent LayerNorm"][0] == "none"


def test_transformer_engine_comes_before_apex(tmp_path):
    te = {f"transformer_engine/{part}": "" for part in ("__init__.py", "pytorch/__init__.py", "pytorch/optimizers.py")}
    place(tmp_path, NVIDIA | te)
    _, rows, _, _ = ask(tmp_path, TABLE)
    assert rows["FusedAdam"][0] == "transformer_engine.pytorch.optimizers.FusedAdam"
    assert rows["multi_tensor_scale"][0] == "transformer_engine.pytorch.optimizers.multi_tensor_scale"
