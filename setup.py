"""Build of `megatron-stability`. Tool settings live in pyproject.toml; everything about the package lives here."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
SHARE = "share/megatron-stability"
HOME = os.environ.get("MEGATRON_STABILITY_URL", "")  # where a release will be found: decided by who publishes it


def version() -> str:
    """The package says it, and nothing else does."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "megatron_stability/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def readme() -> str:
    """With links that hold outside of the repository, where the build knows its address; else as words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    to = rf"[\1]({HOME}/blob/main/\2)" if HOME else r"\1"
    return re.sub(r"(?<!!)\[([^]]+)\]\((?!https?:|#)([^)]+)\)", to, text)


def patch_files() -> list[tuple[str, list[str]]]:
    """(install folder, files) for what is in patches/, so that an installed wheel carries it."""
    folders = sorted(path for path in (ROOT / "patches").rglob("*") if path.is_dir())
    return [
        (
            f"{SHARE}/{folder.relative_to(ROOT)}",
            [str(path.relative_to(ROOT)) for path in sorted([*folder.glob("*.patch"), *folder.glob("*.json")])],
        )
        for folder in folders
    ]


def recipe_files() -> list[tuple[str, list[str]]]:
    """The NeMo recipes, for who has a wheel alone."""
    recipes = sorted((ROOT / "examples/nemo").glob("*.yaml"))
    return [(f"{SHARE}/examples/nemo", [str(path.relative_to(ROOT)) for path in recipes])]


MEGATRON = ["megatron-core[training]>=0.18.2,<0.20", "torch>=2.6"]
# What megatron-bridge 0.6.2 imports for GPTs. Itself it comes without dependencies, some of which are built with CUDA:
# pip install --no-deps megatron-bridge==0.6.2 nvidia-resiliency-ext==0.6.0
NEMO = [
    "megatron-core[training]==0.19.2",  # the pair that is tested; Bridge alone lets a resolver go back to 0.13
    "torch>=2.6",
    "transformers>=5.8,<=5.12.1",
    "omegaconf",
    "hydra-core>=1.3.4,<1.4",
    "einops",
    "datasets>=2.20",
    "diffusers>=0.36",
    "megatron-energon~=7.0",
    "nvidia-modelopt==0.47.0",
    "nvidia-ml-py",
    "defusedxml",
    "tensorboard>=2.19",
]
REPORT = ["plotly>=6", "jinja2>=3.1", "tensorboard>=2.19"]

setup(
    name="megatron-stability",
    version=version(),
    description="Prevents, sees, undoes and explains training instabilities in Megatron-LM and NeMo pretraining",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author="megatron-stability developers",
    keywords="Megatron-LM NeMo pretraining stability FP8 loss-spike checkpoint QK-clip z-loss",
    **({"project_urls": {"Source": HOME, "Documentation": f"{HOME}/tree/main/docs"}} if HOME else {}),
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_stability", "megatron_stability.*"]),
    package_data={
        "megatron_stability": [
            "py.typed",
            "fp8_compare/*.html",
            "report/*.html",
            "report/*.css",
            "decide/presets/*.yaml",
            "megatron/access/flags/*.tsv",
        ]
    },
    data_files=[*patch_files(), *recipe_files()],
    install_requires=[
        "pydantic>=2.9",
        "PyYAML>=6.0",
        "rich>=13",
        "packaging>=24",
        "safetensors>=0.5",
        "xxhash>=3.5",
        "numpy>=2",
    ],
    extras_require={
        "megatron": MEGATRON,
        "nemo": NEMO,
        "te": ["transformer-engine[pytorch]>=2.9", "nvdlfw-inspect>=0.2.2"],
        "modelopt": ["nvidia-modelopt>=0.47"],
        "report": REPORT,
        "alerts": ["apprise>=1.9", "prometheus-client>=0.21"],
        "audit": ["charset-normalizer>=3", "pyarrow>=17", "rensa>=0.3"],
        "tokenizers": ["tokenizers>=0.21", "sentencepiece>=0.2"],
    },
    entry_points={"console_scripts": ["megatron-stability=megatron_stability.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
