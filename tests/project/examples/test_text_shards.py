"""Many files of text: each document once, mixed by weight, gone on with at the sample, and packed to the same bytes."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from project.data import packed
from project.data.documents import Piece, Reading, cut, documents, held_out
from project.data.files import found
from project.data.pack import Request, main, pack
from project.data.text_shards import TextShards
from project.data.text_stream import TextStream
from project.data.tokenizer import named

WORDS = [f"{number:03} " + "abcdefghij"[number % 10] * (number % 23) for number in range(400)]
Write = Callable[..., str]


def write_lines(file: Path, texts: Sequence[str], **more: object) -> str:
    file.write_text("".join(json.dumps({"text": text, **more}) + "\n" for text in texts))
    return str(file)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Four files of a hundred documents each."""
    for number in range(4):
        write_lines(tmp_path / f"{number}.jsonl", WORDS[number::4], id=number)
    return tmp_path


def data(folder: Path, **options: Any) -> TextShards:
    given = {"sources": f"{folder}/*.jsonl", "context": 16, "vocab_size": 256, "held_out_bytes": 200, "seed": 3}
    made = TextShards(**{**given, **options})
    made.setup("fit")
    return made


def pack_into(folder: Path, files: str, workers: int = 1, tokenizer: str = "bytes", **options: Any) -> str:
    asked = {"val": [], "test": [], "reading": Reading(), "held_out_bytes": 200, **options}
    return pack(folder, Request(found([files], "files"), tokenizer=named(tokenizer), **asked), workers)


def texts_of(windows: Any) -> str:
    """The text of windows in their order, each token but the first of all once."""
    return bytes(int(token) for _, targets in windows for token in targets).decode()


def stream_of(folder: Path, **options: Any) -> TextStream:
    stream = data(folder, **options).splits["train"]
    assert isinstance(stream, TextStream)
    return stream


def test_an_epoch_reads_each_document_of_training_once_and_ends_it(corpus: Path) -> None:
    stream = stream_of(corpus, buffer_windows=1)
    read = texts_of(stream).split("\0")
    kept = [document.text for piece in stream.sources[0] for document in documents(piece, stream.reading)]
    assert Counter(read[1:-1]) <= Counter(kept)  # the first has lost its first token
    left_out = sum(map(len, kept)) + len(kept) - sum(map(len, read)) - len(read)
    assert 0 <= left_out <= 16 + 1
    parts = held_out(found([f"{corpus}/*.jsonl"], ""), Reading(), 200, ["val", "test"])
    sets = [[d.text for piece in parts[name] for d in documents(piece, Reading())] for name in ("train", "val", "test")]
    assert sorted(text for texts in sets for text in texts) == sorted(WORDS)  # no split has another's


def test_another_epoch_and_another_seed_are_another_order_and_the_same_are_the_same(corpus: Path) -> None:
    stream = stream_of(corpus)
    first, again = texts_of(stream), texts_of(stream)
    stream.set_epoch(1)
    assert first == again != texts_of(stream)
    assert texts_of(stream_of(corpus, seed=4)) != first


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, 60),
    context=st.integers(20, 60),
    buffer_windows=st.integers(1, 30),
    weights=st.sampled_from([None, [1, 1], [3, 1]]),
    epoch=st.integers(0, 3),
)
def test_a_stream_goes_on_at_the_sample_where_its_state_was_taken(
    corpus: Path, at: int, context: int, buffer_windows: int, weights: list[float] | None, epoch: int
) -> None:
    sources = [f"{corpus}/0.jsonl", f"{corpus}/[12].jsonl"]
    options = {"sources": sources, "weights": weights, "context": context, "buffer_windows": buffer_windows}
    whole, resumed = stream_of(corpus, **options), stream_of(corpus, **options)
    whole.set_epoch(epoch)
    samples = iter(whole)
    before = [inputs.tolist() for inputs, _ in islice(samples, at)]
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    resumed.set_epoch(epoch)
    assert [targets.tolist() for _, targets in resumed] == [targets.tolist() for _, targets in samples]
    assert [inputs.tolist() for inputs, _ in islice(resumed, at)] == before  # an epoch from its beginning


def test_the_state_of_another_stream_is_refused(corpus: Path) -> None:
    state = stream_of(corpus).state_dict()
    with pytest.raises(ValueError, match=r"of a stream with other sources, .* start a new run .* init_from=PATH"):
        stream_of(corpus, context=8).load_state_dict(state)


def test_a_stream_is_mixed_by_weight_and_a_short_source_is_repeated(tmp_path: Path) -> None:
    for letter, times in (("a", 300), ("b", 40)):
        write_lines(tmp_path / f"{letter}.jsonl", [letter * 15] * times)
    sources = [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    stream = stream_of(tmp_path, sources=sources, weights=[3, 1], buffer_windows=40)
    letters = [chr(max(inputs)) for inputs, _ in stream]
    assert all(letters[block : block + 40].count("b") == 10 for block in range(0, len(letters) // 40 * 40, 40))
    assert letters.count("a") in range(280, 301)
    assert letters.count("b") == pytest.approx(letters.count("a") / 3, abs=2)


def test_text_json_lines_and_parquet_at_any_address_are_the_same_documents(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet, table

    lines = "".join(json.dumps({"body": text}) + "\n" for text in WORDS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    parquet.write_table(table({"id": range(400), "body": WORDS}), tmp_path / "a.parquet", row_group_size=70)
    (tmp_path / "a.txt").write_text("<end>".join(WORDS))
    with fsspec.open("memory://shards/a.jsonl", "w") as file:
        file.write(lines)
    reading = Reading(key="body", separator="<end>")
    for address in (*(f"{tmp_path}/a.{end}" for end in ("jsonl.gz", "parquet", "txt")), "memory://shards/*.jsonl"):
        (file,) = found([address], "files")
        assert [document.text for document in documents(Piece(file.address), reading)] == WORDS
        parts = [part for part, _ in cut(Piece(file.address), file.size_bytes, reading, 500)]
        assert len(parts) > 2 or address.endswith(".gz")
        assert [document.text for part in parts for document in documents(part, reading)] == WORDS


_PACKED = gzip.compress(np.random.default_rng(0).bytes(5000).hex().encode())
_HARMED = "found a compressed file that is damaged or truncated"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt.gz", _PACKED[:3000], _HARMED),
        ("a.txt.gz", _PACKED[:3000] + bytes(100) + _PACKED[3100:], _HARMED),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', "line 3: found invalid JSON"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', "line 2: found a value of type list; expected the text at the key text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: found the byte 0xff, which is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}\b.*{message}"):
        list(documents(Piece(f"{tmp_path}/{name}"), Reading()))


def test_packed_is_what_is_read(corpus: Path, tmp_path: Path) -> None:
    said = pack_into(tmp_path / "packed", f"{corpus}/*.jsonl")
    assert "3 shards of 400 documents; tokens: train " in said
    ready, read = data(corpus, sources=str(tmp_path / "packed")), data(corpus)
    for split in ("val", "test"):
        for one, other in zip(ready.loader(split), read.loader(split), strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
    kept = stream_of(corpus).sources[0]
    tokens = np.fromfile(tmp_path / "packed" / "train_00000.bin", np.uint8)
    assert bytes(tokens).decode() == "".join(f"{d.text}\0" for piece in kept for d in documents(piece, Reading()))


def test_packed_folders_bring_the_same_batches_from_worker_processes(corpus: Path, tmp_path: Path) -> None:
    pack_into(tmp_path / "packed", f"{corpus}/*.jsonl")
    made = data(corpus, sources=[f"{tmp_path}/packed"] * 2, weights=[2, 1], batch_size=8)
    alone, made.num_workers = list(made.loader("train")), 1
    for here, there in zip(alone, made.loader("train"), strict=True):
        assert torch.equal(here[0], there[0])
    assert len(pickle.dumps(made.splits["train"])) < 2000  # a worker maps the shards anew


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Some megabytes, that become several shards."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(6):
        write_lines(folder / f"{number}.jsonl", [f"{number} {line} " + "some words " * 50 for line in range(1500)])
    return folder


@pytest.mark.nightly
def test_packing_that_was_killed_goes_on_and_is_the_same_at_any_number_of_processes(many: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    for killed in (tmp_path / f"killed_{count}" for count in itertools.count()):
        command = [sys.executable, "-m", "project.data.pack", str(killed), f"{many}/*.jsonl", "--workers", "2"]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        while not list(killed.glob("*.bin")):
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
        process.wait()
        if not (killed / "manifest.json").exists():  # else it was done before it was killed
            break
    lines = (killed / "progress.jsonl").read_text().splitlines()[1:]
    done = {shard: (killed / shard).stat().st_mtime_ns for shard in (json.loads(line)["name"] for line in lines)}
    options = {"held_out_bytes": 2**18}
    assert pack_into(killed, f"{many}/*.jsonl", **options) == pack_into(whole, f"{many}/*.jsonl", **options).replace(
        "whole", killed.name
    )
    for path in whole.glob("*.bin"):
        assert path.read_bytes() == (killed / path.name).read_bytes()
    assert (whole / "manifest.json").read_text() == (killed / "manifest.json").read_text()
    assert {name: (killed / name).stat().st_mtime_ns for name in done} == done


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.bin", "a/b.bin", 5])
def test_a_manifest_names_files_of_its_folder_alone(name: object, tmp_path: Path) -> None:
    shard = {"name": name, "split": "train", "tokens": 1, "documents": 1, "sha256": ""}
    content = {"format": 1, "tokenizer": "bytes", "vocab_size": 257, "document_end": 256, "shards": [shard]}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"it names a file outside of the folder"):
        packed.read(tmp_path)


def test_damage_is_found_and_only_what_is_missing_is_packed_again(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    pack_into(folder, f"{corpus}/*.jsonl")
    shard, manifest = folder / "train_00000.bin", packed.read(folder)
    good = shard.read_bytes()
    shard.write_bytes(good[:100] + b"?" + good[101:])
    problems = [packed.damage(manifest, each) for each in manifest.shards]
    assert [problem for problem in problems if problem] == [
        f"{shard} is damaged: its checksum differs from the manifest's; remove that file, and type the same pack "
        "command again, which writes what is missing"
    ]
    shard.unlink()
    with pytest.raises(ValueError, match=r"train_00000\.bin is missing; remove that file, and type the same pack"):
        data(corpus, sources=str(folder))
    pack_into(folder, f"{corpus}/*.jsonl")
    assert shard.read_bytes() == good


def save_tokenizer(file: Path) -> int:
    """A BPE that has learned the words; returns how many ids it has."""
    library = pytest.importorskip("tokenizers")
    trained = library.Tokenizer(library.models.BPE())
    trained.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(WORDS, trainer)
    trained.save(str(file))
    size: int = trained.get_vocab_size()
    return size


def test_a_tokenizer_file_goes_with_what_it_has_packed(corpus: Path, tmp_path: Path) -> None:
    size = save_tokenizer(tmp_path / "tokenizer.json")
    pack_into(tmp_path / "packed", f"{corpus}/*.jsonl", tokenizer=f"{tmp_path}/tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    made = data(corpus, sources=f"{tmp_path}/packed", vocab_size=size)
    (ids, _), *_ = made.splits["test"]  # type: ignore[misc]
    assert set(made.decode(ids.tolist()).replace("<|endoftext|>", "").split()) & set(" ".join(WORDS).split())
    with pytest.raises(ValueError, match=rf"has {size} ids, .* ends at 255; set model\.vocab_size={size}"):
        data(corpus, sources=f"{tmp_path}/packed")
    pack_into(tmp_path / "bytes", f"{corpus}/*.jsonl")
    with pytest.raises(ValueError, match=r"were packed with different tokenizers; pack one of them again"):
        data(corpus, sources=[f"{tmp_path}/packed", f"{tmp_path}/bytes"], vocab_size=size)
    with pytest.raises(ValueError, match=r"than bytes; leave data\.tokenizer out, or pack it again with --tok"):
        data(corpus, sources=f"{tmp_path}/packed", tokenizer="bytes", vocab_size=size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": "none/*.jsonl"}, r"data\.sources: no file matches none/\*\.jsonl; give paths or globs"),
        ({"sources": "nonsense://a"}, r"nonsense"),
        ({"weights": [1, 2]}, r"data\.weights is \[1, 2\] for 1 sources \(.*\); expected a number above 0 for each"),
        ({"key": "body"}, r"\.jsonl, line 1: found an object with text, id; expected the text at the key body"),
        ({"vocab_size": 100}, r"the tokenizer has 256 ids, .* ends at 99; set model\.vocab_size=256"),
        ({"context": 10_000}, r"too little text: expected a window of 10000 tokens, .* for val; give more text"),
        (
            {"tokenizer": "gone.json"},
            r"found no file gone\.json; give bytes, the path of a tokenizer\.json, or the name of a",
        ),
        ({"buffer_windows": 0}, r"data\.buffer_windows is 0; expected at least 1"),
        ({"val": "none.txt"}, r"data\.val: no file matches none\.txt"),
    ],
)
def test_what_does_not_fit_is_told_in_a_line(corpus: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data(corpus, **options)


def test_a_packed_folder_is_of_its_own_files_and_complete(corpus: Path, tmp_path: Path) -> None:
    folder, files = tmp_path / "packed", f"{corpus}/*.jsonl"
    with pytest.raises(ValueError, match=r"is not empty: it has 0\.jsonl, 1\.jsonl, 2\.jsonl; name a new folder"):
        pack_into(corpus, files)
    pack_into(folder, files)
    with pytest.raises(ValueError, match=r"has shards of other files, .*; name a new folder"):
        pack_into(folder, f"{corpus}/1.jsonl")
    with pytest.raises(ValueError, match=r"has both a packed folder, .*, and files, .*; pack the files, too"):
        data(corpus, sources=[str(folder), files])
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"a folder that was not packed, or not completely; type its pack command"):
        data(corpus, sources=str(folder))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("packed none*", "error: files: no file matches none*"),
        ("packed *.jsonl --tokenizer gone.json", "error: tokenizer: found no file gone.json"),
        ("packed --verify", "error: packed has no manifest.json"),
        ("packed", "give either files to pack or --verify"),
    ],
)
def test_the_packer_refuses_in_a_line(
    corpus: Path, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(corpus)
    monkeypatch.setattr(sys, "argv", ["pack", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
