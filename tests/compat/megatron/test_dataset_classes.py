"""Dataset classes that programs derive, and that a `dataset.yaml` names."""

from __future__ import annotations

import json
import sys
import types
from itertools import islice

import pytest

from megatron.energon import (
    BaseWebdatasetFactory,
    ConfigError,
    Cooker,
    CrudeSample,
    CrudeWebdataset,
    DefaultDecoderWebdatasetFactory,
    DefaultGenericWebdatasetFactory,
    DefaultTaskEncoder,
    MapDataset,
    Sample,
    SampleDecoder,
    SecurityError,
    TextSample,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from megatron.energon.dataset_config import get_dataset_from_config
from tests.datasets import make_crude

TEXTS = [12, 9, 11]


@edataclass
class ChatSample(Sample):
    conversation: str
    number: int = 0


class Shout:
    """A decoder like that of webdataset: takes a sample, returns a sample."""

    def __call__(self, sample):
        return {
            name: part.decode().upper() if name == "txt" else part for name, part in sample.items()
        }


class ChatWebdataset(DefaultDecoderWebdatasetFactory[ChatSample]):
    """As trainers have it: a type, a constructor, a decoder of its own."""

    __sample_type__ = ChatSample

    def __init__(self, path, *, auto_decode: bool = True, loud: bool = False, **kwargs):
        super().__init__(path, **kwargs)
        if auto_decode and loud:
            self._decoder = Shout()


class PickyWebdataset(ChatWebdataset):
    def sample_filter(self, key: str) -> bool:
        shard, _, name = key.rpartition("/")
        assert shard.endswith(".tar")
        return int(name.strip("s")) % 2 == 0

    def load_sample(self, sample) -> ChatSample:
        assert isinstance(sample["txt"], bytes)
        loaded = super().load_sample(sample)
        loaded.number = int(sample["__key__"].strip("s"))
        return loaded


class RawWebdataset(BaseWebdatasetFactory[TextSample]):
    __sample_type__ = TextSample

    def load_sample(self, sample) -> TextSample:
        return TextSample(
            __key__=sample["__key__"],
            __restore_key__=sample["__restore_key__"],
            __subflavors__={"raw": True},
            __sources__=sample["__sources__"],
            text=sample["txt"].decode(),
        )


class LongerWebdataset(ChatWebdataset):
    def build(self, worker_rotation_offset: int = 0):
        return MapDataset(
            super().build(worker_rotation_offset), mark, worker_config=self.worker_config
        )


class LoudCrudeWebdataset(CrudeWebdataset):
    def load_sample(self, sample):
        found = super().load_sample(sample)
        found["txt"] = found["txt"].upper()
        return found


class NotADataset:
    def __init__(self, **kwargs):
        raise AssertionError("a document has called a class of the program")


def mark(sample):
    sample.number = 7
    return sample


def config(num_workers=0, **more):
    return WorkerConfig(rank=0, world_size=1, num_workers=num_workers, lanes=2, **more)


def describe(root, name, **settings):
    document = {"__module__": __name__, "__class__": name, **settings}
    (root / ".nv-meta/dataset.yaml").write_text(json.dumps(document))
    return root


FIELDS = {"field_map": {"conversation": "txt"}}


@pytest.fixture
def root(tmp_path):
    return make_crude(tmp_path / "chats", TEXTS)


def read(dataset):
    with get_savable_loader(dataset) as loader:
        return [sample for batch in loader for sample in batch]


def train(path, **settings):
    defaults = {"worker_config": config(), "batch_size": 4, "task_encoder": Lists()}
    return get_train_dataset(path, **{**defaults, **settings})


class Lists(DefaultTaskEncoder):
    def batch(self, samples):
        return samples


def validated(path, **settings):
    defaults = {"split_part": "train", "worker_config": config(), "batch_size": 4}
    return read(get_val_dataset(path, **{**defaults, "task_encoder": Lists(), **settings}))


def test_a_document_names_a_class_of_the_program(root):
    describe(root, "ChatWebdataset", subflavors={"kind": "chat"}, **FIELDS)
    plain = validated(root)
    assert len(plain) == sum(TEXTS)
    assert type(plain[0]) is ChatSample
    assert plain[0].__subflavors__ == {"kind": "chat"}
    assert plain[0].__sources__[0].file_names == ("s0.txt",)
    describe(root, "ChatWebdataset", loud=True, **FIELDS)
    assert [each.conversation for each in validated(root)] == [
        each.conversation.upper() for each in plain
    ]
    describe(root, "ChatWebdataset", loud=True, auto_decode=False, **FIELDS)
    assert validated(root)[0].conversation == plain[0].conversation


def test_samples_are_filtered_and_loaded_as_the_class_does(root):
    describe(root, "PickyWebdataset", **FIELDS)
    found = validated(root)
    assert sorted(each.number for each in found) == list(range(0, sum(TEXTS), 2))
    restored = get_val_dataset(
        root, split_part="train", worker_config=config(), batch_size=4, task_encoder=Lists()
    ).restore_sample(found[3].__restore_key__)
    assert restored == found[3]


def test_a_class_may_do_without_field_maps(root):
    describe(root, "RawWebdataset")
    assert validated(root)[0].__subflavors__ == {"raw": True}
    assert isinstance(validated(root)[0], TextSample)


def test_the_decoder_of_the_task_encoder_is_that_of_the_class_unless_it_says_otherwise(root):
    class Raw(Lists):
        decoder = None

    describe(root, "ChatWebdataset", **FIELDS)
    assert isinstance(validated(root, task_encoder=Raw())[0].conversation, bytes)
    describe(root, "ChatWebdataset", decoder={"image_decode": "pil"}, **FIELDS)
    assert isinstance(validated(root, task_encoder=Raw())[0].conversation, str)
    dataset = get_dataset_from_config(root, worker_config=config())
    assert dataset._decoder == SampleDecoder(image_decode="pil")


def test_crude_samples_of_a_class_are_cooked(root):
    class Cooks(Lists):
        cookers = [Cooker(cook)]  # noqa: RUF012 - as programs have it

    describe(root, "LoudCrudeWebdataset")
    crude = validated(root)
    assert isinstance(crude[0], CrudeSample)
    assert crude[0]["txt"].isupper()
    assert [each.text for each in validated(root, task_encoder=Cooks())] == [
        each["txt"] for each in crude
    ]


def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


@pytest.mark.parametrize("name", ["ChatWebdataset", "PickyWebdataset", "LongerWebdataset"])
def test_it_has_the_order_and_the_states_of_any_other_dataset(root, tmp_path, name):
    other = make_crude(tmp_path / "other", [14])
    standard = {"__module__": "megatron.energon", "__class__": "StandardWebdatasetFactory"}
    kind = {"sample_type": {"__module__": __name__, "__class__": "ChatSample"}}
    (other / ".nv-meta/dataset.yaml").write_text(json.dumps({**standard, **kind, **FIELDS}))
    blend = [{"weight": 2, "path": str(root)}, {"weight": 1, "path": str(other)}]
    document = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": blend}},
    }

    def keys(loader, batches):
        return [
            [(s.__subflavors__.get("n"), s.__key__, s.number) for s in batch]
            for batch in islice(loader, batches)
        ]

    describe(root, name, loud=True, subflavors={"n": 1}, **FIELDS)
    with get_savable_loader(train(document)) as loader:
        whole = keys(loader, 12)
    # That classes of programs come to processes does not depend on which they are.
    for num_workers in (0, 2) if name == "ChatWebdataset" else (0,):
        dataset = train(document, worker_config=config(num_workers))
        with get_savable_loader(dataset) as loader:
            assert keys(loader, 5) == whole[:5]
            state = json.loads(json.dumps(loader.save_state_rank()))
        with get_savable_loader(train(document)) as loader:
            loader.restore_state_rank(state)
            assert keys(loader, 7) == whole[5:]
    if name == "ChatWebdataset":
        # The same draws as those of a dataset that needs no class.
        (root / ".nv-meta/dataset.yaml").write_text(
            json.dumps({**standard, **kind, **FIELDS, "subflavors": {"n": 1}})
        )
        with get_savable_loader(train(document)) as loader:
            assert keys(loader, 12) == whole
    if name == "LongerWebdataset":
        assert {number for batch in whole for n, _, number in batch if n == 1} == {7}


def test_getters_give_the_object_of_the_program(root):
    describe(root, "ChatWebdataset", **FIELDS)
    ((_, dataset),) = get_val_datasets(
        root, split_part="train", worker_config=config(), batch_size=2
    )
    assert type(dataset) is ChatWebdataset
    assert dataset.training is False
    assert dataset.worker_config == config()
    opened = get_dataset_from_config(root, worker_config=config(), sample_type=ChatSample)
    assert type(opened) is ChatWebdataset
    assert len(opened) == sum(TEXTS)
    with pytest.raises(AssertionError, match="TextSample"):
        get_dataset_from_config(root, worker_config=config(), sample_type=TextSample)


def test_classes_are_subscripted_as_types_are():
    for kind in (BaseWebdatasetFactory, DefaultGenericWebdatasetFactory, CrudeWebdataset):
        derived = types.new_class("Derived", (kind[ChatSample],))
        assert issubclass(derived, kind)


def test_a_document_may_not_name_just_any_class(root, monkeypatch, tmp_path):
    describe(root, "NotADataset")
    with pytest.raises(SecurityError, match="not a subclass"):
        validated(root)
    with pytest.raises(ConfigError, match="is not a dataset class"):
        validated(root, allow=("code",))
    describe(root, "ChatWebdatasets", **FIELDS)
    with pytest.raises(ConfigError, match="did you mean 'ChatWebdataset'"):
        validated(root)
    (tmp_path / "elsewhere_chat.py").write_text(
        f"from {__name__} import ChatWebdataset as Base\nclass Mine(Base): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (root / ".nv-meta/dataset.yaml").write_text(
        json.dumps({"__module__": "elsewhere_chat", "__class__": "Mine", **FIELDS})
    )
    with pytest.raises(SecurityError, match="import it in your program"):
        validated(root)
    assert "elsewhere_chat" not in sys.modules
    assert len(validated(root, allow=("code",))) == sum(TEXTS)
    del sys.modules["elsewhere_chat"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "/etc"}, "a dataset.yaml cannot set 'path'"),
        ({"louder": True}, "louder"),
        ({"field_map": {"conversatio": "txt"}}, "conversatio"),
        ({"split_part": "nothing"}, "nothing"),
    ],
)
def test_what_a_document_says_has_to_make_sense(root, settings, message):
    describe(root, "ChatWebdataset", **{**FIELDS, **settings})
    with pytest.raises(ConfigError, match=message):
        validated(root)


def test_code_beside_the_dataset_has_to_be_allowed(root):
    describe(root, "ChatWebdataset", sample_loader="code.py:load", part_filter="code.py:want")
    (root / ".nv-meta/code.py").write_text(
        "def load(parts): return {'conversation': parts['txt'] + '!'}\n"
        "def want(part): return part == 'txt'\n"
    )
    with pytest.raises(SecurityError, match="code of the dataset"):
        validated(root)
    assert validated(root, allow=("code",))[0].conversation.endswith("!")


def test_subsets_and_excludes_narrow_it(root):
    describe(root, "ChatWebdataset", subset={"range": ["0%", "50%"]}, **FIELDS)
    assert len(validated(root)) == sum(TEXTS) // 2
    describe(root, "ChatWebdataset", **FIELDS)
    document = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"path": str(root), "subset": {"range": [2, 7]}}},
    }
    assert [each.__key__ for each in validated(document)] == [f"s{n}" for n in range(2, 7)]
