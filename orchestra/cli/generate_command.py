"""`orchestra generate RUN TEXT`: a sample from a checkpoint, to see what was learned. Reads the run."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.schema import DataConfig, Source
from orchestra.cli.checkpoint.checkpoint_ls_command import add_run_arguments, open_place
from orchestra.cli.checkpoint.checkpoint_process import ask
from orchestra.data.token_files import TokenIndex, index_of, local_prefix, token_file_prefix
from orchestra.data.tokenizer import (
    BYTES,
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    open_tokenizer,
)
from orchestra.errors import EXIT_DONE, ConfigError, DataError
from orchestra.plugins import is_plugin
from orchestra.report.run_state import name_of

_MOST = 2**62
_EXPLAINED = """\
  orchestra generate RUN "def main("           another sample with each --seed
  orchestra generate RUN "def main(" --greedy  the likeliest token each time
  orchestra generate RUN "Once" --temperature 0.7 --top-p 0.9 --max-tokens 200

The text is taken as the beginning of a document. The tokenizer is that of the run's data; where its file was
moved, --tokenizer says where it is now. It is compared with what packed the data as long as that is there.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser, step_help=None)
    parser.add_argument("text", type=_utf8, metavar="TEXT", help="what the sample goes on from")
    parser.add_argument(
        "--step", type=_number(int, 0), metavar="STEP", help="default: the newest that is intact"
    )
    parser.add_argument("--max-tokens", type=_number(int, 1), default=200, metavar="N", help="default: 200")
    parser.add_argument(
        "--temperature", type=_number(float, 0), default=1.0, metavar="T", help="0: greedy (default: 1)"
    )
    parser.add_argument(
        "--top-p",
        type=_share,
        default=1.0,
        metavar="P",
        help="of the likeliest only (default: 1)",
    )
    parser.add_argument("--greedy", action="store_true", help="the same as --temperature 0")
    parser.add_argument("--seed", type=_number(int, 0), default=0, help="equal seeds give equal samples")
    parser.add_argument("--tokenizer", metavar="FILE", help="the tokenizer.json that packed the data")
    parser.add_argument("--json", action="store_true", help="print text and tokens as JSON")
    parser.epilog = _EXPLAINED


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= _MOST:
            limits = f"at most {_MOST}" if value is not None and value > _MOST else f"{least} or more"
            raise ArgumentTypeError(f"{text!r}: give a number, {limits}")
        return value

    return read


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentTypeError(f"character {error.start} is not UTF-8; give text in UTF-8") from error
    return text


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        # No token could be drawn from no share at all.
        raise ArgumentTypeError(f"{text!r}: give a number above 0, at most 1; --greedy takes the likeliest")
    return value


def run(arguments: Namespace) -> int:
    """Sample and return 0. Raises ConfigError where the tokenizer is not known."""
    place = open_place(arguments.run, arguments.dir)
    tokenizer = tokenizer_of(place.config.data, arguments.tokenizer)
    words, known = max(tokenizer.vocab_size, tokenizer.separator_id + 1), place.config.model.vocab_size
    if words > known:
        raise ConfigError(
            f"--tokenizer {arguments.tokenizer}: has {words:,} tokens, and the model knows {known:,}; give "
            "the one that the data was packed with"
        )
    (encoded,) = tokenizer.encode([arguments.text])
    request = {
        # What stands before each document in training, but the first.
        "tokens": [tokenizer.separator_id, *encoded.tolist()],
        "end_id": tokenizer.separator_id,
        "vocab_size": words,
        "max_tokens": arguments.max_tokens,
        "temperature": 0.0 if arguments.greedy else arguments.temperature,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
    }
    step, found = ask(place, arguments.step, "generate", request)
    text = continuation(tokenizer, encoded.tolist(), found["tokens"])
    if arguments.json:
        facts = {"run": name_of(place.run), "step": step, "prompt": arguments.text, "text": text}
        print(json.dumps({**facts, **found}))
    else:
        print(arguments.text + text)
    return EXIT_DONE


def continuation(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text by which `tokens` go on from those before them.

    Alone they would read as the beginning of a text, where many tokenizers leave out a space.
    """
    begin, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    return whole.removeprefix(begin) if whole.startswith(begin) else tokenizer.decode(tokens)


def tokenizer_of(data: DataConfig, given: str | None) -> Tokenizer:
    """Return the tokenizer of a run's data: `given`, or beside the token file. Raises ConfigError."""
    if data.source == Source.stdlib:
        return _of_bytes(given)
    if is_plugin(data.source):
        if given is not None:
            return _of_unknown_data(given)
        raise ConfigError(
            f"data.source={data.source} gives tokens, and says nothing of the text that they stand for; give "
            "the tokenizer whose tokens they are with --tokenizer FILE"
        )
    path = data.path or data.blend[0].path
    try:
        index = index_of(path)
    except (DataError, OSError) as error:
        if given is not None:
            return _of_unknown_data(given)
        raise ConfigError(
            f"the tokenizer is not known: {error}; give the one that packed the data with --tokenizer FILE"
        ) from error
    if index.tokenizer == BYTES:
        return _of_bytes(given)
    file = Path(given).expanduser() if given else _beside(path, index)
    if file is not None and file.is_dir():
        file /= "tokenizer.json"
    if file is None or not file.exists():
        raise ConfigError(
            f"the data was packed with {index.tokenizer} (sha256 {index.tokenizer_sha256[:16]}), and there "
            f"is no file{f' {file}' if file else ''}; give --tokenizer FILE"
        )
    tokenizer = HuggingFaceTokenizer(file, index.separator_id)
    if tokenizer.sha256 != index.tokenizer_sha256:
        raise ConfigError(
            f"{file} has sha256 {tokenizer.sha256[:16]}, the data was packed with "
            f"{index.tokenizer_sha256[:16]}; give the one that packed it with --tokenizer FILE"
        )
    return tokenizer


def _of_unknown_data(given: str) -> Tokenizer:
    """Return a tokenizer that nothing can be compared with, whose own end-of-text token ends documents."""
    try:
        return open_tokenizer(given)
    except ConfigError as error:
        said, _, _ = str(error).partition("; give --separator")
        if said == str(error):
            raise
        advice = "name its eos_token in a tokenizer_config.json beside it"
        raise ConfigError(f"{said}, which ends the text; {advice}") from error


def _of_bytes(given: str | None) -> ByteTokenizer:
    if given is not None:
        raise ConfigError(f"--tokenizer {given}: the run reads bytes, which need no tokenizer; leave it out")
    return ByteTokenizer()


def _beside(path: str, index: TokenIndex) -> Path | None:
    local = local_prefix(token_file_prefix(path))
    return None if local is None else Path(local).parent / index.tokenizer
