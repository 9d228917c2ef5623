"""Task encoders as trainers write them: types, inheritance, generators, errors."""

from __future__ import annotations

import random
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path

from common import (
    config,
    cooked,
    encoder,
    loader,
    raised,
    texts,
    train,
    val,
)


def path(folder):
    return Path(folder) / "texts"


def captions(folder):
    return Path(folder) / "captions"


def default(energon, base=None, /, *args, **hooks):
    """Return an encoder of a program for typed samples."""
    kind = type("Encoder", (base or energon.DefaultTaskEncoder,), hooks)
    return kind(*args)


def run(energon, folder, task_encoder, *, get=val, count=None, **settings):
    dataset = get(energon, captions(folder), task_encoder=task_encoder, **settings)
    return list(islice(loader(energon, dataset), count))


def check_batches_of_a_plain_task_encoder(energon, folder):
    found = run(energon, folder, default(energon, energon.TaskEncoder), batch_size=4)
    return [[type(each).__name__, each.caption, each.__key__] for each in found]


def check_batches_of_a_default_task_encoder(energon, folder):
    found = run(energon, folder, energon.DefaultTaskEncoder(), batch_size=4)
    return [[type(each).__name__, each.caption, each.__key__] for each in found]


def check_default_types(energon, folder):
    edataclass = energon.edataclass

    @edataclass
    class Encoded(energon.Sample):
        image: object
        caption: str

    @edataclass
    class Raw(energon.Batch):
        image: list
        caption: list

    @edataclass
    class Final(energon.Batch):
        image: list
        caption: list

    task_encoder = energon.DefaultTaskEncoder(
        encoded_sample_type=Encoded, raw_batch_type=Raw, batch_type=Final
    )
    found = run(energon, folder, task_encoder, batch_size=3)
    return [[type(each).__name__, each.caption] for each in found]


def check_batches_that_are_dicts(energon, folder):
    task_encoder = energon.DefaultTaskEncoder(batch_type=dict)
    found = run(energon, folder, task_encoder, batch_size=3)
    return [[type(each).__name__, sorted(each), each["caption"]] for each in found]


def check_samples_that_are_dicts(energon, folder):
    task_encoder = energon.DefaultTaskEncoder(encoded_sample_type=dict, raw_batch_type=dict)
    found = run(energon, folder, task_encoder, batch_size=None)
    return [[type(each).__name__, each["caption"], each["__key__"]] for each in found]


def check_batching_by_field(energon, folder):
    def batch(self, samples):
        return self._batch(
            samples, dict, actions={"caption": len}, default_action=energon.batch_list
        )

    found = run(energon, folder, default(energon, batch=energon.stateless(batch)), batch_size=4)
    return [[each["caption"], each["__key__"], len(each["image"])] for each in found]


def check_derived_batches(energon, folder):
    @energon.edataclass
    class Tokens(energon.Batch):
        lengths: list

    def batch(self, samples):
        return Tokens.from_samples(samples, lengths=[len(s.caption) for s in samples])

    def encode_batch(self, batch):
        return Tokens.derive_from(batch, lengths=[-n for n in batch.lengths])

    hooks = {"batch": batch, "encode_batch": encode_batch}
    found = run(energon, folder, default(energon, **hooks), batch_size=4)
    return [[each.lengths, each.__key__, len(each.__restore_key__) > 0] for each in found]


def check_batch_fields(energon, folder):
    def batch(self, samples):
        return energon.Batch.from_samples(samples)

    found = run(energon, folder, default(energon, batch=energon.stateless(batch)), batch_size=2)
    return [[each.__key__, [s.index for s in each.__sources__]] for each in found]


def check_a_batch_hook_that_yields(energon, folder):
    def batch(self, samples):
        for n in range(0, len(samples), 2):
            yield [sample.caption for sample in samples[n : n + 2]]

    return run(energon, folder, default(energon, batch=energon.stateless(batch)), batch_size=4)


def check_a_batch_hook_that_skips(energon, folder):
    def batch(self, samples):
        if samples[0].__key__.endswith("26"):
            raise energon.SkipSample
        return [sample.caption for sample in samples]

    return run(energon, folder, default(energon, batch=energon.stateless(batch)), batch_size=2)


def check_encode_batch_that_skips_and_yields(energon, folder):
    def batch(self, samples):
        return [sample.caption for sample in samples]

    def encode_batch(self, batch):
        if batch[0].endswith("24"):
            raise energon.SkipSample
        yield batch
        yield batch[::-1]

    hooks = {"batch": energon.stateless(batch), "encode_batch": energon.stateless(encode_batch)}
    return run(energon, folder, default(energon, **hooks), batch_size=2)


def check_encode_and_preencode(energon, folder):
    def same(self, sample):
        return sample

    both = default(energon, encode_sample=same, preencode_sample=same)
    only = default(energon, select_samples_to_pack=same)
    return (
        raised(run, energon, folder, both) is not None,
        raised(run, energon, folder, only, packing_buffer_size=4) is not None,
    )


def check_postencode_without_packing(energon, folder):
    def preencode_sample(self, sample):
        sample.caption = f"pre {sample.caption}"
        return sample

    def postencode_sample(self, sample):
        for n in range(2):
            yield energon.CaptioningSample.derive_from(
                sample, image=n, caption=f"post {n} {sample.caption}"
            )

    hooks = {"preencode_sample": preencode_sample, "postencode_sample": postencode_sample}
    hooks = {name: energon.stateless(value) for name, value in hooks.items()}
    return [each.caption for each in run(energon, folder, default(energon, **hooks), batch_size=4)]


def check_packs_that_yield(energon, folder):
    def select_samples_to_pack(self, samples):
        return [samples]

    def pack_selected_samples(self, samples):
        for n in range(0, len(samples), 2):
            yield energon.CaptioningSample.derive_from(
                samples[n], image=n, caption=[s.caption for s in samples[n : n + 2]]
            )

    hooks = {
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": energon.stateless(pack_selected_samples),
    }
    found = run(energon, folder, default(energon, **hooks), batch_size=1, packing_buffer_size=3)
    return [each.caption for each in found]


def check_packs_that_drop_samples(energon, folder):
    def select_samples_to_pack(self, samples):
        return [[], samples[:1], samples[2:]]

    def pack_selected_samples(self, samples):
        if len(samples) == 1:
            raise energon.SkipSample
        return [sample.caption for sample in samples]

    hooks = {
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": energon.stateless(pack_selected_samples),
    }
    settings = {"batch_size": None, "packing_buffer_size": 4}
    return run(energon, folder, default(energon, **hooks), **settings)


def check_groups_of_a_fixed_size(energon, folder):
    def batch_group_criterion(self, sample):
        return int(sample.__key__) % 3 == 0, None

    def batch(self, samples):
        return [sample.caption for sample in samples]

    hooks = {"batch_group_criterion": batch_group_criterion, "batch": batch}
    whole = run(energon, folder, default(energon, **hooks), batch_size=2)
    dropped = run(energon, folder, default(energon, **hooks), batch_size=3, batch_drop_last=True)
    return whole, dropped


def check_augmenting_an_encoder(energon, folder):
    def encode_sample(self, sample):
        sample.caption = f"inner {sample.caption}"
        return sample

    inner = default(energon, encode_sample=energon.stateless(encode_sample))

    class Augmented(energon.AugmentTaskEncoder):
        def encode_sample(self, sample):
            sample = super().encode_sample(sample)
            sample.caption = f"outer {sample.caption}"
            return sample

        def batch(self, samples):
            return [s.caption for s in samples]

    return run(energon, folder, Augmented(inner), batch_size=3)


def check_an_encoder_with_mixins(energon, folder):
    class Prefixed:
        prefix = "-"

        def encode_sample(self, sample):
            sample = super().encode_sample(sample)
            sample.caption = self.prefix + sample.caption
            return sample

    class Loud(Prefixed, energon.DefaultTaskEncoder):
        prefix = "+"

        def __init__(self, mark):
            super().__init__()
            self.mark = mark

        @energon.stateless
        def encode_sample(self, sample):
            sample = super().encode_sample(sample)
            sample.caption += self.mark
            return sample

    return [each.caption for each in run(energon, folder, Loud("!"), batch_size=4)]


def check_failures_are_tolerated_up_to_a_number(energon, folder):
    def encode_sample(self, sample):
        raise ValueError(sample.__key__)

    hook = energon.stateless(failure_tolerance=3)(encode_sample)
    quiet = config(energon, global_error_handler=lambda *args: None)
    dataset = train(
        energon,
        captions(folder),
        epoch=False,
        worker_config=quiet,
        task_encoder=default(energon, encode_sample=hook),
    )
    try:
        next(iter(loader(energon, dataset)))
    except Exception as error:
        errors = import_module("megatron.energon.errors")
        return isinstance(error, errors.FatalSampleError), isinstance(error, ValueError)
    return None


def check_errors_of_programs_that_end_runs(energon, folder):
    found = []
    errors = import_module("megatron.energon.errors")
    for kind in (NameError, ImportError, errors.FatalSampleError, KeyError):

        def encode_sample(self, sample, kind=kind):
            if sample.__key__ == "024":
                raise kind("x")
            return sample

        task_encoder = default(energon, encode_sample=energon.stateless(encode_sample))
        try:
            found.append(len(run(energon, folder, task_encoder, batch_size=None)))
        except Exception as error:
            found.append(isinstance(error, errors.FatalSampleError))
    return found


def check_handlers_are_told_sources(energon, folder):
    seen = []

    def handler(exception, sample, sources):
        seen.append([str(exception), sample.__key__, [source.index for source in sources or ()]])

    def encode_sample(self, sample):
        if int(sample.__key__) % 2:
            raise ValueError(f"odd {sample.__key__}")
        return sample

    settings = config(energon, global_error_handler=handler)
    dataset = energon.get_val_dataset(
        captions(folder),
        worker_config=settings,
        batch_size=None,
        task_encoder=default(energon, encode_sample=energon.stateless(encode_sample)),
    )
    return [each.caption for each in loader(energon, dataset)], seen


def check_errors_of_batches_are_handled(energon, folder):
    seen = []

    def handler(exception, sample, sources):
        seen.append([type(exception).__name__, [each.__key__ for each in sample]])

    def batch(self, samples):
        if samples[0].__key__ == "026":
            raise ValueError("batch")
        return [sample.caption for sample in samples]

    dataset = energon.get_val_dataset(
        captions(folder),
        worker_config=config(energon, global_error_handler=handler),
        batch_size=2,
        task_encoder=default(energon, batch=energon.stateless(batch)),
    )
    return list(loader(energon, dataset)), seen


def check_errors_of_selections_are_handled(energon, folder):
    seen = []

    def handler(exception, sample, sources):
        seen.append([type(exception).__name__, [each.__key__ for each in sample]])

    def select_samples_to_pack(self, samples):
        if samples[0].__key__ == "024":
            raise ValueError("selection")
        return [samples]

    def pack_selected_samples(self, samples):
        return [sample.caption for sample in samples]

    hooks = {
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": energon.stateless(pack_selected_samples),
    }
    dataset = energon.get_val_dataset(
        captions(folder),
        worker_config=config(energon, global_error_handler=handler),
        batch_size=None,
        packing_buffer_size=3,
        task_encoder=default(energon, **hooks),
    )
    return list(loader(energon, dataset)), seen


def check_cookers_that_do_not_match(energon, folder):
    cook = energon.stateless(partial(cooked, energon))
    cookers = [energon.Cooker(cook, has_subflavors={"of": "nothing"})]
    dataset = partial(val, energon, path(folder), task_encoder=encoder(energon, cookers=cookers))
    return raised(dataset)


def check_cookers_that_skip(energon, folder):
    @energon.stateless
    def cook(sample):
        if sample["json"]["n"] % 2:
            raise energon.SkipSample
        return cooked(energon, sample)

    cookers = [energon.Cooker(cook)]
    dataset = val(energon, path(folder), task_encoder=encoder(energon, cookers=cookers))
    return texts(loader(energon, dataset))


def check_cooking_by_a_method(energon, folder):
    def cook_crude_sample(self, sample, cooker, aux):
        made = cooker.cook(sample, **aux)
        made.text = f"{sample['__subflavors__']['of']} {made.text}"
        return made

    hooks = {"cook_crude_sample": energon.stateless(cook_crude_sample)}
    return texts(
        loader(energon, val(energon, path(folder), task_encoder=encoder(energon, **hooks)))
    )


def check_a_decoder_of_the_program(energon, folder):
    class Decoder(energon.SampleDecoder):
        def decode(self, fname, raw):
            return fname if fname.endswith(".json") else super().decode(fname, raw)

    @energon.stateless
    def cook(sample):
        return cooked(energon, sample)

    store = energon.DecodeFileStore(
        energon.SystemFileStore(import_module("megatron.energon.epathlib").EPath(folder)),
        decoder=Decoder(),
    )
    return store.get("media/001.txt"), raised(store.get, "media/none.txt") is not None


def check_samples_are_copied_from(energon, folder):
    @energon.edataclass
    class Tokens(energon.Sample):
        tokens: list
        extra: int = 3

    base = energon.TextSample(
        __key__="k", __restore_key__=("a", 1), __subflavors__={"x": 1}, text="abc"
    )
    made = Tokens.derive_from(base, tokens=[1])
    return (
        [made.__key__, made.__restore_key__, made.__subflavors__, made.tokens, made.extra],
        raised(Tokens.derive_from, base, nothing=1),
        raised(Tokens, "k", [1]),
        repr(base).startswith("TextSample("),
        made == Tokens.derive_from(base, tokens=[1]),
        hasattr(made, "__dict__"),
    )


def check_joined_samples(energon, folder):
    @energon.edataclass
    class Both(energon.Sample):
        text: str
        caption: str
        image: int

    settings = {"__restore_key__": (), "__subflavors__": {"a": 1}}
    text = energon.TextSample(__key__="t", text="x", **settings)
    caption = energon.CaptioningSample(__key__="c", image=1, caption="y", **settings)
    made = Both.from_joined(text, caption)
    return made.__key__, made.text, made.caption, made.image, made.__subflavors__


def check_collating(energon, folder):
    torch = import_module("torch")
    ones, more = torch.ones(2, 3), torch.ones(4, 1)
    padded = energon.generic_batch([ones, more])
    nested = energon.generic_batch([{"a": ones, "b": "x"}, {"a": more, "b": "y"}])
    joined = energon.generic_concat([{"a": ones, "b": ["x"]}, {"a": more, "b": ["y"]}])
    return (
        list(padded.shape),
        float(padded.sum()),
        [list(nested["a"].shape), nested["b"]],
        list(energon.concat_pad([ones, more]).shape),
        list(joined["a"].shape),
        energon.generic_batch([1, 2]),
        type(energon.generic_batch([True, False])).__name__,
        energon.generic_batch(["a", "b"]),
        energon.generic_batch([None, None]),
        list(energon.batch_pad_stack([torch.ones(1, 5), torch.ones(3, 2)]).shape),
        raised(energon.batch_stack, [ones, more]) is not None,
    )


def check_pinning(energon, folder):
    torch = import_module("torch")
    sample = energon.CaptioningSample(
        __key__="a", __restore_key__=(), image=torch.ones(2), caption="x"
    )
    return hasattr(sample, "pin_memory"), hasattr(energon.Batch, "pin_memory")


def check_seeds_of_hooks_that_yield(energon, folder):
    @energon.stateless(restore_seeds=True)
    def encode_sample(self, sample):
        for _ in range(3):
            yield energon.CaptioningSample.derive_from(
                sample, image=random.random(), caption=sample.caption
            )

    def get():
        return loader(
            energon,
            train(
                energon,
                captions(folder),
                epoch=False,
                batch_size=None,
                task_encoder=default(energon, encode_sample=encode_sample),
            ),
        )

    samples = list(islice(get(), 7))
    again = get().restore_sample(samples[4].__restore_key__)
    numbers = [sample.image for sample in samples]
    return again.image == samples[4].image, len(set(numbers)) == len(numbers)


def check_global_generators_are_put_back(energon, folder):
    torch = import_module("torch")
    numpy = import_module("numpy")

    @energon.stateless(restore_seeds=True)
    def encode_sample(self, sample):
        sample.image = [random.random(), float(torch.rand(1)), float(numpy.random.rand())]
        return sample

    dataset = val(
        energon,
        captions(folder),
        batch_size=None,
        task_encoder=default(energon, encode_sample=encode_sample),
    )
    random.seed(3)
    expected = random.random()
    random.seed(3)
    samples = list(loader(energon, dataset))
    return len({str(sample.image) for sample in samples}), random.random() == expected


def check_hooks_know_their_cache(energon, folder):
    def encode_sample(self, sample):
        sample.caption = type(self.cache).__name__
        return sample

    task_encoder = default(energon, encode_sample=energon.stateless(encode_sample))
    dataset = val(energon, captions(folder), batch_size=None, task_encoder=task_encoder)
    pool = energon.NoCachePool()
    return {sample.caption for sample in loader(energon, dataset, cache_pool=pool)} == {
        "NoCachePool"
    }


def check_settings_of_old_getters(energon, folder):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = val(
            energon,
            captions(folder),
            batch_size=2,
            auto_decode=True,
            image_decode="pil",
            handler=lambda error, key: None,
            task_encoder=energon.DefaultTaskEncoder(),
        )
        return [batch.caption for batch in loader(energon, dataset)]


def check_names_a_getter_does_not_know(energon, folder):
    return (
        raised(val, energon, captions(folder), nothing=1) is not None,
        raised(energon.get_train_dataset, captions(folder)),
        raised(energon.get_train_dataset, captions(folder), worker_config=config(energon)),
        raised(val, energon, Path(folder) / "not-there") is not None,
        raised(val, energon, captions(folder), split_part="none") is not None,
    )


def check_stateless_marks(energon, folder):
    base = import_module("megatron.energon.task_encoder.base")

    @energon.stateless
    def plain(sample):
        return sample

    @energon.stateless(restore_seeds=True, failure_tolerance=5)
    def seeded(sample):
        return sample

    return (
        base.get_stateless(plain),
        base.get_stateless(seeded),
        base.get_stateless(len),
        plain.__name__,
        seeded.__name__,
        base.get_failure_tolerance(len, 7),
    )
