from pathlib import Path

import pytest

from streamsrv.bench.prompt_file import read_prompts
from streamsrv.errors import SettingsError


def test_each_line_of_a_text_file_with_text_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text('one two\n\n   \n{"prompt": "three"}\n')
    assert read_prompts(path, "--prompts") == ("one two", '{"prompt": "three"}')


def test_each_line_of_json_is_a_text_or_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '"one\\ntwo"\n'
        '{"prompt": "three"}\n'
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Four?"}]}\n'
        '[{"role": "user", "content": "Five?"}]\n'
    )
    assert read_prompts(path, "--prompts") == (
        "one\ntwo",
        "three",
        [("system", "Be brief."), ("user", "Four?")],
        [("user", "Five?")],
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 of --prompts .* is not JSON"),
        ("3", "line 2 of --prompts .* is no prompt; it must be a string"),
        ("{}", "is no prompt"),
        ('""', "is no prompt"),
        ('{"messages": []}', "is no prompt"),
        ('["user"]', "a message that is none"),
        ('[{"role": "poet", "content": "x"}]', r"needs a role \(system, user, assistant, tool\)"),
        ('[{"role": ["user"], "content": "x"}]', "needs a role"),
        ('[{"role": "user", "content": 3}]', "a text as content"),
    ],
)
def test_a_line_of_json_that_is_no_prompt_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    with pytest.raises(SettingsError, match=sentence):
        read_prompts(path, "--prompts")


@pytest.mark.parametrize("content", [b"\n  \n", b""])
def test_a_file_without_prompts_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="has no line with text"):
        read_prompts(path, "--prompts")


def test_a_file_that_is_no_text_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"one\n\xff\n")
    with pytest.raises(SettingsError, match=r"is not UTF-8 text \(at byte 4\)"):
        read_prompts(path, "--prompts")
