"""What a variant reads and writes while it is predicted: weights from files, checkpoints, and a Trainer's own step."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import pickle
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch

from effgpu.predicting.calls import kept
from effgpu.predicting.files import Files
from effgpu.predicting.predict import predict
from effgpu.predicting.weights import weights_set_aside

SIZES = {"vocab_size": 1000, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bert(layers=4):
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers, max_position_embeddings=512, **SIZES))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    ids, labels = torch.randint(0, 1000, (8, 64)), torch.zeros(8, dtype=torch.long)

    def step():
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_from_pretrained_in_a_variant_is_the_model_of_its_config(here):
    from transformers import AutoModelForSequenceClassification

    bert().save_pretrained("saved")
    environment = dict(os.environ)
    loaded = predict(lambda: train(AutoModelForSequenceClassification.from_pretrained("saved")), "T4")
    built = predict(lambda: train(bert().eval()), "T4")
    assert loaded.owners["weights"] == built.owners["weights"]
    assert loaded.allocated == pytest.approx(built.allocated, rel=0.01)
    assert loaded.time().expected == pytest.approx(built.time().expected, rel=0.01)
    assert os.environ == environment


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0"])
def test_weights_that_torch_loads_in_a_variant_are_counted_once(here, device):
    torch.save(torch.nn.Linear(1024, 1024).state_dict(), "weights.pt")

    def variant(load=True):
        model = torch.nn.Linear(1024, 1024)
        if load:
            model.load_state_dict(torch.load("weights.pt", map_location=device))
        model.to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(torch.zeros(8, 1024, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    loaded, built = predict(variant, "T4"), predict(lambda: variant(False), "T4")
    assert loaded.allocated == built.allocated
    assert not loaded.unknown and not loaded.assumptions


TO_GPU = [None, "cuda", {"cpu": "cuda:0"}, {"cuda:1": "cuda:0"}, lambda storage, place: None]
TO_CPU = ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, lambda storage, place: storage]


@pytest.mark.parametrize(("where", "on_gpu"), [*((each, 2) for each in TO_GPU), *((each, 1) for each in TO_CPU)])
def test_weights_that_were_not_written_are_loaded_where_the_script_says(here, where, on_gpu):
    def variant():
        weight = torch.ones(1024, 1024, device="cuda")
        torch.save({"weight": weight}, "weights.pt")
        loaded = torch.load("weights.pt", map_location=where)["weight"]
        assert loaded.is_cuda == (on_gpu == 2) and loaded is not weight
        return lambda: (weight, loaded)

    assert predict(variant, "T4").allocated == on_gpu * 4 * 1024**2


@pytest.mark.parametrize("way", ["file", "bytes", "memory"])
def test_a_pickle_of_weights_is_written_nowhere_and_given_again(here, way):
    def variant():
        weight = torch.ones(1024, 1024, device="cuda")
        if way == "bytes":
            loaded = pickle.loads(pickle.dumps({"weight": weight, "step": 3}))
        else:
            with io.BytesIO() if way == "memory" else open("weights.pkl", "wb") as file:
                pickle.dump({"weight": weight, "step": 3}, file)
                if way == "memory":
                    file.seek(0)
                    loaded = pickle.load(file)
            if way == "file":
                with open("weights.pkl", "rb") as file:
                    loaded = pickle.load(file)
        assert loaded["step"] == 3 and loaded["weight"].is_cuda and loaded["weight"] is not weight
        return lambda: (weight, loaded)

    predicted = predict(variant, "T4")
    assert predicted.allocated == 2 * 4 * 1024**2 and "pickle.dump" in str(predicted.notes)
    assert pickle.loads(pickle.dumps([1, 2])) == [1, 2], "as ever, afterwards"


def test_what_is_saved_stays_in_no_memory_and_tied_weights_are_loaded_as_one(here):
    def variant(saves):
        model = torch.nn.Sequential(torch.nn.Embedding(512, 512), torch.nn.Linear(512, 512, bias=False)).cuda()
        model[1].weight = model[0].weight

        def step():
            model(torch.zeros(8, dtype=torch.long, device="cuda")).sum().backward()
            held = torch.ones(1024, 1024, device="cuda")
            if saves:
                torch.save([held, model], "held.pt")
            del held
            if saves:
                _, other = torch.load("held.pt", map_location="cpu", weights_only=False)
                assert other is not model and other[1].weight is other[0].weight
                assert isinstance(other[0].weight, torch.nn.Parameter) and not other[0].weight.is_cuda

        return step

    saved, plain = (predict(partial(variant, saves), "T4") for saves in (True, False))
    assert saved.allocated == plain.allocated and not saved.kept


def test_a_checkpoint_of_a_variant_is_not_written_and_an_older_one_stays(here):
    (here / "checkpoint_2.pt").write_text("an earlier one")

    def variant():
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.AdamW(model.parameters())
        count = 0

        def step():
            nonlocal count
            model(torch.randn(8, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            count += 1
            if count % 2 == 0:
                torch.save(model.state_dict(), f"checkpoint_{count}.pt")
            torch.save(torch.ones(3), "data.pt")

        return step

    predicted = predict(variant, "T4")
    assert (here / "checkpoint_2.pt").read_text() == "an earlier one"
    unwritten = "not written, as its weights have no values: torch.save to "
    assert set(predicted.notes) == {f"{unwritten}checkpoint_2.pt", f"{unwritten}data.pt"}
    torch.save(torch.nn.Linear(2, 2).state_dict(), "checkpoint_2.pt")  # as ever, afterwards
    assert torch.load("checkpoint_2.pt")["weight"].shape == (2, 2)


def test_a_variant_finds_what_it_writes_and_leaves_nothing_that_it_computed(here, monkeypatch):
    """Also by functions that its module imported before. What it prepares before its step stays."""
    monkeypatch.setattr(sys.modules[__name__], "remove", os.remove, raising=False)
    for name in ("log.txt", "best.json", "old.txt"):
        (here / name).write_text(name)

    def variant():
        (here / "data.txt").write_text("prepared")
        model = torch.nn.Linear(256, 256)

        def step():
            model(torch.randn(8, 256)).sum().backward()
            with open("log.txt", "a") as log:
                log.write("a line")
            assert (here / "log.txt").read_text().endswith("a line")
            (here / "part.json").write_text("{}")
            os.replace("part.json", "best.json")
            assert (here / "best.json").read_text() == "{}"
            os.makedirs("runs/1", exist_ok=True)
            (here / "runs/1/events").write_bytes(b"an event")
            if os.path.exists("old.txt"):
                sys.modules[__name__].remove("old.txt")
            assert not os.path.exists("old.txt") and (here / "runs/1/events").exists()

        time.sleep(0.05)  # what a file system's clock may lag
        return step

    predicted = predict(variant, "T4")
    found = {path.name: path.read_text() for path in here.iterdir()}
    assert found == {"data.txt": "prepared", **{name: name for name in ("log.txt", "best.json", "old.txt")}}
    assert {note.rpartition(" ")[2] for note in predicted.notes} == {"log.txt", "best.json", "old.txt"}


def write_number(file):
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(number, b"new")
    os.close(number)
    return lambda: open(file, "rb").read() == b"new"


def write_raw(file):
    with io.FileIO(file, "w") as raw:
        raw.write(b"new")
    return lambda: isinstance(raw, io.FileIO) and io.FileIO(file).read() == b"new"


def write_packed(file):
    for packer in (gzip, bz2, lzma):
        with packer.open(file, "wt") as packed:
            packed.write("new")
    return lambda: lzma.open(file, "rt").read() == "new"


def write_mapped(file):
    mapped = numpy.memmap(file, mode="w+", shape=(4,))
    mapped[:] = 3
    mapped.flush()
    return lambda: numpy.memmap(file, mode="r", shape=(4,)).tolist() == [3] * 4


def write_database(file):
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE IF NOT EXISTS losses (loss)")
        database.execute("INSERT INTO losses VALUES (0.5)")
        database.commit()
    read = lambda: sqlite3.connect(f"file:{file}?mode=ro", uri=True).execute("SELECT loss FROM losses").fetchall()
    return lambda: (0.5,) in read()


def write_arrow(file):
    parquet, table = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow").table({"new": [1, 2]})
    parquet.write_table(table, file)
    with parquet.ParquetWriter(file, table.schema) as writer:
        writer.write_table(table)
    return lambda: parquet.read_table(file).column_names == ["new"]


def write_streamed(file):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"new": [1, 2]})
    with arrow.OSFile(file, "wb") as sink, arrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return lambda: arrow.ipc.open_file(arrow.memory_map(file)).read_all().column_names == ["new"]


def write_part(file):
    shutil.copy(__file__, file)
    os.truncate(file, 3)
    return lambda: open(file).read() == '"""'


WRITERS = write_number, write_raw, write_packed, write_mapped, write_database, write_arrow, write_streamed, write_part


@pytest.mark.parametrize("write", WRITERS)
def test_whatever_writes_a_file_leaves_one_from_before_and_reads_its_own(here, write):
    for folder in ("new", "old"):
        os.mkdir(folder)
    write("old/file")
    text = (here / "old/file").read_bytes()
    time.sleep(0.05)

    def variant():
        model = torch.nn.Linear(256, 256)

        def step():
            model(torch.randn(8, 256)).sum().backward()
            for folder in ("new", "old"):
                assert write(f"{folder}/file")() and os.path.getsize(f"{folder}/file")

        time.sleep(0.05)
        return step

    notes = predict(variant, "T4").notes
    assert notes == ("left as it is, a file from before: old/file",)
    assert (here / "old/file").read_bytes() == text
    assert {str(path) for path in here.rglob("*")} == {str(here / name) for name in ("new", "old", "old/file")}


def test_archives_hold_weights_that_were_not_written(here):
    def variant():
        weight = torch.ones(64, 64, device="cuda")

        def is_whole(file):
            return torch.load(file)["weight"].shape == (64, 64)

        def step():
            state = {"weight": weight}
            torch.save(state, "weights.pt")
            size = os.path.getsize("weights.pt")
            assert size == len((here / "weights.pt").read_bytes()) and 4 * 64 * 64 < size < 4 * 64 * 64 + 1000
            with zipfile.ZipFile("whole.zip", "w") as archive:
                archive.write("weights.pt")
                with archive.open("direct.pt", "w") as file:
                    torch.save(state, file)
            with zipfile.ZipFile("whole.zip") as archive:
                assert archive.getinfo("weights.pt").file_size == size
                for name in archive.namelist():
                    with archive.open(name) as file:
                        assert is_whole(file)
                archive.extractall("unpacked")
            with tarfile.open("whole.tar.gz", "w:gz") as archive:
                archive.add("weights.pt")
            with tarfile.open("whole.tar.gz") as archive:
                assert is_whole(archive.extractfile("weights.pt"))
            (here / "copied.pt").write_bytes((here / "weights.pt").read_bytes())
            assert is_whole("copied.pt") and is_whole("unpacked/weights.pt")
            for packer in (gzip, bz2, lzma):
                with packer.open("packed.pt", "wb") as file:
                    torch.save(state, file)
                with packer.open("packed.pt", "rb") as file:
                    assert is_whole(file)

        return step

    predict(variant, "T4")
    assert not [*here.iterdir()]


def test_a_lock_from_before_can_be_taken(here):
    """Such as that of load_dataset, from an earlier run: filelock waits for ever where a file has no name any more."""
    filelock = pytest.importorskip("filelock")
    (here / "data.lock").touch()
    before = os.stat("data.lock")

    def variant():
        for _ in range(2):
            with filelock.FileLock("data.lock", timeout=2) as lock:
                assert lock.is_locked
        model = torch.nn.Linear(256, 256)
        return lambda: model(torch.randn(8, 256)).sum().backward()

    assert not predict(variant, "T4").notes, "nothing is written to it"
    after = os.stat("data.lock")
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


def test_a_file_that_another_program_keeps_writing_is_from_before_too(here):
    """Its times are those of now."""
    log = here / "log.txt"
    log.write_text("a line\n")
    other = os.open(log, os.O_WRONLY | os.O_APPEND)

    def variant():
        os.write(other, b"another\n")
        model = torch.nn.Linear(256, 256)

        def step():
            model(torch.randn(8, 256)).sum().backward()
            with open("log.txt", "a") as mine:
                mine.write("mine\n")

        return step

    predict(variant, "T4")
    os.close(other)
    assert log.read_text() == "a line\nanother\n"


def test_a_temporary_folder_that_a_variant_makes_outlives_it_and_what_got_hold_of_a_function_works(here):
    (here / "old").mkdir()
    (here / "old/file").write_text("old")
    held = []

    def variant():
        folder = tempfile.mkdtemp()
        held.extend([folder, shutil.rmtree, open])
        return lambda: (here / folder / "file").write_text("x")

    predict(variant, "T4")
    folder, remove, opened = held
    assert (here / folder / "file").exists()
    remove(folder)
    with opened("old/file", "w") as file:
        file.write("new")
    remove("old")
    assert not (here / folder).exists() and not (here / "old").exists()


def test_other_threads_than_a_variants_write_as_ever(here):
    (here / "log.txt").write_text("before")
    written, asked = threading.Event(), threading.Event()

    def write():
        asked.wait()
        (here / "log.txt").write_text("after")
        written.set()

    threading.Thread(target=write).start()

    def variant():
        return lambda: (asked.set(), written.wait())

    notes = predict(variant, "T4").notes
    assert notes == ("changed by another program, or by code that is not followed: log.txt",)
    assert (here / "log.txt").read_text() == "after"


def test_a_module_that_had_imported_what_saves_writes_nothing_either(here, monkeypatch):
    from safetensors.torch import save_file as safe_save_file

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "safe_save_file", safe_save_file, raising=False)

    def variant():
        model = torch.nn.Linear(8, 8)

        def step():
            model(torch.zeros(8, 8)).mean().backward()
            module.safe_save_file(model.state_dict(), "model.safetensors")

        return step

    assert "safetensors' save_file to model.safetensors" in predict(variant, "T4").notes[0]
    assert not (here / "model.safetensors").exists() and module.safe_save_file is safe_save_file


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=str)
def test_a_trainer_trains_in_a_variant_as_its_step_by_hand(here, options):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": [0] * 512, "label": 0}] * 64

    def variant():
        arguments = TrainingArguments("out", max_steps=1, report_to=[], per_device_train_batch_size=32, **options)
        trainer = Trainer(bert(), arguments, train_dataset=rows)
        return lambda: trainer.train()

    def by_hand():
        model = bert().train()
        if options:
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step():
            ids, labels = torch.zeros(32, 512, dtype=torch.long), torch.zeros(32, dtype=torch.long)
            model(input_ids=ids, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step

    trained, expected = predict(variant, "A100 40 GB"), predict(by_hand, "A100 40 GB")
    assert trained.allocated == pytest.approx(expected.allocated, rel=0.01)
    assert trained.time().expected == pytest.approx(expected.time().expected, rel=0.1)  # its sampler reads 64 numbers
    assert trained.notes == ("not written, as its weights have no values: the Trainer's checkpoint in out",)
    assert not (here / "out" / "checkpoint-1").exists()


@pytest.mark.parametrize("asked, switched_on, noted", [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_a_trainers_step_by_hand_says_what_train_would_have_switched_on(here, asked, switched_on, noted):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    batch = {"input_ids": torch.zeros(4, 32, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}

    def variant():
        trainer = Trainer(bert(), TrainingArguments("out", report_to=[], gradient_checkpointing=asked))
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
        if switched_on:
            trainer.model.gradient_checkpointing_enable()
        return lambda: (trainer.training_step(trainer.model, batch), trainer.optimizer.step())

    told = [why for why in predict(variant, "T4").assumptions if why.startswith("without the gradient checkpointing")]
    assert len(told) == noted


@pytest.fixture
def set_aside(here):
    files = Files(time.time())
    with weights_set_aside(files):
        yield files
        files.clean()


@pytest.mark.usefixtures("set_aside")
def test_weights_that_are_set_aside_can_be_copied_with_their_folder(here):
    os.mkdir("last")
    torch.save(torch.ones(4), "last/weights.pt")
    shutil.copytree("last", "best")
    shutil.move("best", "older")
    os.symlink("older", "latest")
    os.utime("latest/weights.pt")
    assert torch.load("latest/weights.pt").tolist() == [1] * 4 and os.path.getsize("older/weights.pt")


@pytest.mark.usefixtures("set_aside")
def test_tensors_that_are_set_aside_are_read_again(here):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    for value in (1.0, 2.0):
        save_file({"weight": torch.full([4], value)}, "best.safetensors")
        assert load_file("best.safetensors")["weight"].tolist() == [value] * 4
        with safe_open(filename="best.safetensors", framework="pt") as opened:
            assert opened.get_tensor("weight").tolist() == [value] * 4


def test_a_link_that_leads_nowhere_is_a_file_like_others(here):
    os.symlink("gone.pt", "latest.pt")
    for number in range(8):  # a folder's files come in any order
        os.mkdir(f"run{number}")
        Path(f"run{number}/best.txt").write_text("kept")
        os.symlink("nowhere", f"run{number}/last")
    time.sleep(0.02)
    with kept(files := Files(time.time())):
        os.remove("latest.pt")
        os.symlink("later.pt", "newest.pt")
        for number in range(8):
            shutil.rmtree(f"run{number}")
        assert (
            not os.path.lexists("latest.pt") and not os.path.exists("run0") and os.readlink("newest.pt") == "later.pt"
        )
        files.clean()
    assert os.readlink("latest.pt") == "gone.pt"
    assert {Path(f"run{number}/best.txt").read_text() for number in range(8)} == {"kept"}


def test_a_folder_that_cannot_be_looked_at_counts_as_from_before(here, monkeypatch):
    def refuse(path):
        raise PermissionError(path)

    os.mkdir("new")
    monkeypatch.setattr("effgpu.predicting.files._scandir", refuse)
    assert Files(time.time() - 60).is_from_before(os.path.abspath("new"))


def test_weights_that_are_set_aside_take_no_room_once_they_are_deleted(here, set_aside):
    before = len(os.listdir("/dev/fd"))
    for number in range(20):
        torch.save(torch.full([4], number), f"{number}.pt")
        os.link(f"{number}.pt", f"best{number}.pt")
        torch.save(torch.full([4], number), "last.pt.part")
        os.replace("last.pt.part", "last.pt")
        for old in range(number):
            for name in (f"{old}.pt", f"best{old}.pt"):
                if os.path.exists(name):
                    os.remove(name)
        assert [torch.load(name)[0] for name in (f"best{number}.pt", "last.pt")] == [number] * 2
    assert len(os.listdir("/dev/fd")) <= before + 2
