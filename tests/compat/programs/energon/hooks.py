"""Hooks of task encoders."""

from __future__ import annotations

from pathlib import Path

from common import cooked, encoder, flat, loader, texts, train, val


def path(folder):
    return Path(folder) / "texts"


def run(energon, folder, *, get=train, count=None, settings=None, **hooks):
    marked = {
        name: energon.stateless(value) if callable(value) else value
        for name, value in hooks.items()
    }
    dataset = get(
        energon, path(folder), task_encoder=encoder(energon, **marked), **(settings or {})
    )
    return texts(loader(energon, dataset), count)


def check_skipping(energon, folder):
    def encode_sample(self, sample):
        if int(sample.__key__) % 3:
            raise energon.SkipSample
        return sample

    return sorted(flat(run(energon, folder, encode_sample=encode_sample)))


def check_a_generator_hook(energon, folder):
    def encode_sample(self, sample):
        for n in range(int(sample.__key__) % 3):
            yield energon.TextSample.derive_from(sample, text=f"{sample.text}/{n}")

    return run(energon, folder, get=val, encode_sample=encode_sample)


def check_packing(energon, folder):
    def select_samples_to_pack(self, samples):
        return [samples[i : i + 3] for i in range(0, len(samples), 3)]

    def pack_selected_samples(self, samples):
        return energon.TextSample.derive_from(samples[0], text=[s.text for s in samples])

    hooks = {
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": pack_selected_samples,
    }
    settings = {"packing_buffer_size": 6, "batch_size": 1}
    return run(energon, folder, get=val, settings=settings, **hooks)


def check_packing_in_two_steps(energon, folder):
    def preencode_sample(self, sample):
        sample.text = f"pre {sample.text}"
        return sample

    def select_samples_to_pack(self, samples):
        return [samples[::2], samples[1::2]]

    def postencode_sample(self, sample):
        sample.text = f"post {sample.text}"
        return sample

    def pack_selected_samples(self, samples):
        return energon.TextSample.derive_from(samples[0], text=[s.text for s in samples])

    settings = {"packing_buffer_size": 4, "batch_size": 2}
    return run(
        energon,
        folder,
        get=val,
        settings=settings,
        preencode_sample=preencode_sample,
        select_samples_to_pack=select_samples_to_pack,
        postencode_sample=postencode_sample,
        pack_selected_samples=pack_selected_samples,
    )


def check_groups(energon, folder):
    def batch_group_criterion(self, sample):
        return int(sample.__key__) % 2, 2 + int(sample.__key__) % 2

    settings = {"batch_size": None}
    return run(
        energon, folder, get=val, settings=settings, batch_group_criterion=batch_group_criterion
    )


def check_batches(energon, folder):
    def batch(self, samples):
        texts = [sample.text for sample in samples]
        return energon.TextSample.derive_from(samples[0], text=texts)

    def encode_batch(self, batch):
        batch.text = [*batch.text, "encoded"]
        return batch

    return run(energon, folder, get=val, batch=batch, encode_batch=encode_batch)


def check_batches_that_are_left(energon, folder):
    whole = run(energon, folder, get=train, settings={"batch_drop_last": True, "batch_size": 5})
    rest = run(energon, folder, get=train, settings={"batch_size": 5})
    return [sorted(map(len, whole)), sorted(map(len, rest))]


def check_numbers_of_samples_and_batches(energon, folder):
    def encode_sample(self, sample):
        sample.text = [self.current_sample_index, self.current_batch_index]
        return sample

    return run(energon, folder, get=val, encode_sample=encode_sample)


def check_numbers_of_samples_in_training(energon, folder):
    def encode_sample(self, sample):
        sample.text = [self.current_sample_index, self.current_batch_index]
        return sample

    hooks = {"encode_sample": encode_sample}
    settings = {"epoch": False, "batch_size": 3, "task_encoder": encoder(energon, **hooks)}
    return texts(loader(energon, train(energon, path(folder), **settings)), 5)


def check_numbers_of_several_outputs(energon, folder):
    def encode_sample(self, sample):
        for _ in range(2):
            text = self.current_sample_index
            yield energon.TextSample.derive_from(sample, text=text)

    return run(energon, folder, get=val, settings={"batch_size": 3}, encode_sample=encode_sample)


def check_numbers_when_a_sample_is_made_again(energon, folder):
    def encode_sample(self, sample):
        sample.text = [self.current_sample_index, self.current_batch_index]
        return sample

    hooks = {"encode_sample": energon.stateless(encode_sample)}

    def get():
        dataset = train(
            energon,
            path(folder),
            epoch=False,
            batch_size=None,
            task_encoder=encoder(energon, **hooks),
        )
        return loader(energon, dataset)

    iterator = iter(get())
    samples = [next(iterator) for _ in range(8)]
    again = get().restore_sample(samples[6].__restore_key__)
    return samples[6].text, again.text


def check_seeds_of_samples(energon, folder):
    import random

    @energon.stateless(restore_seeds=True)
    def encode_sample(self, sample):
        sample.text = [sample.text, random.random()]
        return sample

    def get():
        task_encoder = encoder(energon, encode_sample=encode_sample)
        return loader(
            energon,
            train(energon, path(folder), epoch=False, batch_size=None, task_encoder=task_encoder),
        )

    iterator = iter(get())
    samples = [next(iterator) for _ in range(5)]
    again = get().restore_sample(samples[3].__restore_key__)
    return again.text == samples[3].text


def check_cookers_are_chosen_by_subflavors(energon, folder):
    def make(mark):
        @energon.stateless
        def cook(sample):
            made = cooked(energon, sample)
            made.text = f"{mark} {made.text}"
            return made

        return cook

    cookers = [
        energon.Cooker(make("more"), has_subflavors={"of": "more"}),
        energon.Cooker(make("texts"), has_subflavors={"of": "texts"}),
        energon.Cooker(make("any")),
    ]
    dataset = val(energon, path(folder), task_encoder=encoder(energon, cookers=cookers))
    return texts(loader(energon, dataset))


def check_lazies_and_caches(energon, folder):
    pool = energon.FileStoreCachePool(parent_cache_dir=Path(folder) / "cache")

    def cook(sample, cache, primary):
        lazy = cache.get_lazy(primary, f"{sample['__key__']}.txt")
        sample = energon.TextSample(**energon.basic_sample_keys(sample), text=lazy)
        return sample

    def postencode_sample(self, sample):
        sample.text = sample.text.get(sample)
        return sample

    def select_samples_to_pack(self, samples):
        return [[sample] for sample in samples]

    def pack_selected_samples(self, samples):
        return samples[0]

    marked = energon.stateless(energon.cooker(need_cache=True, need_primary=True)(cook))
    hooks = {
        "cookers": [energon.Cooker(marked)],
        "postencode_sample": energon.stateless(postencode_sample),
        "select_samples_to_pack": select_samples_to_pack,
        "pack_selected_samples": energon.stateless(pack_selected_samples),
    }
    dataset = val(
        energon, path(folder), packing_buffer_size=4, task_encoder=encoder(energon, **hooks)
    )
    return texts(loader(energon, dataset, cache_pool=pool))


def check_samples_say_where_they_are_from(energon, folder):
    dataset = val(energon, path(folder), batch_size=None)
    sample = next(iter(loader(energon, dataset)))
    source = sample.__sources__[0]
    return (
        Path(str(source.dataset_path)).name,
        source.shard_name,
        source.index,
        list(source.file_names),
        sample.__key__,
    )
