"""YAML as every room reads it: safe, no key twice, and of bounded size, also once its aliases are written out.

Nine lines of aliases can stand for a billion values (`a: [*b, *b, ...]`); PyYAML shares them, but whoever copies or
prints the result does not. So what a text stands for is counted before any of it is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from megatron_stability import files

LARGEST = 1 << 18  # bytes of a text
MOST = 100_000  # values that it may stand for


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, to which a key that stands twice is an error: the last one would win silently."""

    def get_single_node(self) -> yaml.Node | None:
        """The text's tree, counted."""
        node = super().get_single_node()
        if node is not None:
            _count(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the base class; called for every mapping of the file."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key `{key.value}` stands twice", problem_mark=key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below a node, those of an alias as often as it stands there."""
    if id(node) in known:
        if not known[id(node)]:
            raise yaml.MarkedYAMLError(problem="an alias stands within what it names", problem_mark=node.start_mark)
        return known[id(node)]
    known[id(node)] = 0  # being counted
    found = 1
    if isinstance(node, yaml.CollectionNode):
        for part in node.value:
            found += sum(_count(each, known) for each in (part if isinstance(part, tuple) else (part,)))
            if found > MOST:
                raise yaml.MarkedYAMLError(
                    problem=f"its aliases stand for more than {MOST:,} values", problem_mark=node.start_mark
                )
    known[id(node)] = found
    return found


def parse(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        YAMLError: not YAML, by our measure: a key that stands twice, a date that is none, endless nesting, aliases that
            stand for too much.
    """
    refuse_large(text)
    try:
        return yaml.load(text, _Loader)  # noqa: S506  # a safe loader
    except (RecursionError, ValueError, TypeError, AttributeError) as error:  # of nested brackets; of 2020-99-99
        raise yaml.YAMLError(str(error)) from None


def refuse_large(text: str) -> None:
    """Raise for a text that no configuration is as long as.

    Raises:
        YAMLError: it has too many bytes.
    """
    if len(text) > LARGEST:
        raise yaml.MarkedYAMLError(problem=f"it has {len(text):,} characters, of which {LARGEST:,} are read at most")


def read(file: Path) -> str:
    """The text of a YAML file, once what it stands for is known to be little; for a parser of somebody else's.

    Raises:
        OSError: it can't be read, is no regular file, or is too large.
        YAMLError: as `parse`.
        UnicodeDecodeError: it is not UTF-8.
    """
    text = files.read_bytes(file, LARGEST).decode()
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None:
            _count(node, {})
    except (RecursionError, ValueError, TypeError, AttributeError) as error:
        raise yaml.YAMLError(str(error)) from None
    return text
