"""No text of a document becomes a Python object but in `samples/sample_types.py`.

A static check: every place of the source that looks something up by a name that is not written
there, imports or runs what it is given, or unpickles, is in the table below with the reason why
no data decide on it. A new place either uses `resolve_class`, or gets a line and a reason.
"""

from __future__ import annotations

from tests.source_modules import ROOT, modules_in, source_modules

PLACES = {
    "names from a table in the code": """
        energon/__init__.py: getattr(import_module(_HOME[name]), name)
        energon/__init__.py: globals()[name]
        energon/__init__.py: import_module(_HOME[name])
        energon/cli/main.py: getattr(import_module(home), attribute)
        energon/cli/main.py: import_module(home)
        energon/compat/megatron/datasets/others.py: globals()[name]
        energon/compat/megatron/datasets/webdataset.py: getattr(type(self), name, None)
        energon/compat/megatron/finder.py: getattr(import_module(self.module), self.name)
        energon/compat/megatron/finder.py: import_module(f'{ROOT}.edataclass')
        energon/compat/megatron/finder.py: import_module(f'{module.__name__}.{name}')
        energon/compat/megatron/finder.py: import_module(self.module)
        energon/compat/megatron/finder.py: setattr(module, name, value)
        energon/compat/megatron/getters.py: getattr(core, _name)
        energon/compat/megatron/getters.py: globals()[_name]
        energon/compat/megatron/getters.py: globals()[name]
        energon/io/backends/object_backend.py: getattr(self._library().store, kind)
        energon/io/files.py: getattr(import_module(f'energon.io.{module}'), name)
        energon/io/files.py: import_module(f'energon.io.{module}')
        energon/loader/processes/start.py: importlib.import_module(name)
        energon/metadataset/kind.py: getattr(import_module(module), attribute)
        energon/metadataset/kind.py: import_module(module)
        energon/task_encoder/cooker.py: getattr(cooker, f'need_{name}')
        energon/webdataset/__init__.py: globals()[name]
        energon/webdataset/filters.py: globals()[f'_{_make.__name__}']
        energon/webdataset/names.py: getattr(import_module(home), name)
        energon/webdataset/names.py: import_module(f'{PACKAGE}.{name}')
        energon/webdataset/names.py: import_module(home)
        megatron/energon/__init__.py: sys.modules[__name__]
    """,
    "names of fields, which a class declares": """
        energon/cli/preview.py: getattr(sample, each.name)
        energon/compat/megatron/datasets/webdataset.py: vars(self)[name]
        energon/compat/megatron/encoder.py: getattr(described, each.name)
        energon/compat/megatron/wrappers/own.py: getattr(self, name)
        energon/compat/megatron/wrappers/own.py: getattr(self._dataset, name)
        energon/compat/megatron/wrappers/own.py: setattr(self, name, state[name])
        energon/compat/megatron/wrappers/own.py: vars(mine)[name]
        energon/compat/megatron/wrappers/streams.py: getattr(self, name)
        energon/compat/megatron/wrappers/streams.py: setattr(self, name, _saved(value))
        energon/formats/tables/part_table.py: getattr(self, name)
        energon/loader/monitoring/accounts.py: setattr(stage_times, _FIELDS[kind], number)
        energon/loader/options.py: getattr(self, name)
        energon/loader/transport/pickling.py: getattr(value, name)
        energon/loader/transport/pickling.py: hasattr(value, name)
        energon/metadataset/grammar.py: getattr(self, name)
        energon/metadataset/resolve.py: getattr(node, key)
        energon/plan/balance.py: getattr(self, name)
        energon/plan/blends/blend.py: getattr(self, name)
        energon/plan/leaves/leaf_order.py: getattr(self, name)
        energon/plan/line.py: getattr(self, name)
        energon/plan/recipe.py: getattr(self, name)
        energon/samples/collate.py: attrgetter('name')
        energon/samples/collate.py: getattr(each, name)
        energon/samples/collate.py: getattr(item, each.name, None)
        energon/samples/collate.py: getattr(value, name)
        energon/samples/sample.py: getattr(sample, name)
        energon/samples/sample.py: getattr(self, name)
        energon/samples/sample.py: getattr(self, name, None)
        energon/samples/sample.py: getattr(value, name)
        energon/samples/sample_types.py: getattr(sample, name)
        energon/sources/measures.py: getattr(self, name)
        energon/sources/tables/token_files.py: getattr(self, name)
        energon/task_encoder/dataset.py: getattr(self, name)
        energon/task_encoder/train_plan.py: getattr(settings, name)
        energon/viewer/parts.py: getattr(value, each.name)
        energon/viewer/run_pages.py: getattr(batch, each.name)
        energon/webdataset/dataset_spec.py: getattr(self, name)
        energon/webdataset/mix.py: getattr(mix.pipeline[0], name)
        energon/webdataset/mix.py: setattr(mix.pipeline[0], name, value)
        energon/webdataset/stages/base.py: getattr(self, name)
        energon/worker.py: getattr(self, name)
    """,
    "names of hooks, from the code": """
        energon/compat/megatron/encoder.py: getattr(AugmentTaskEncoder, name)
        energon/compat/megatron/encoder.py: getattr(TaskEncoder, builder)
        energon/compat/megatron/encoder.py: getattr(TaskEncoder, name)
        energon/compat/megatron/encoder.py: getattr(core.TaskEncoder, name)
        energon/compat/megatron/encoder.py: getattr(inner, name)
        energon/compat/megatron/encoder.py: getattr(self, name)
        energon/compat/megatron/encoder.py: getattr(self.task_encoder, name)
        energon/compat/megatron/encoder.py: getattr(task_encoder, name)
        energon/compat/megatron/encoder.py: getattr(type(encoder), builder, None)
        energon/compat/megatron/encoder.py: getattr(type(self), name)
        energon/compat/megatron/encoder.py: getattr(type(self), name, None)
        energon/compat/megatron/encoder.py: hasattr(inner, name)
        energon/compat/megatron/encoder.py: setattr(AugmentTaskEncoder, _name, _delegate(_name))
        energon/compat/megatron/encoder.py: setattr(self, name, getattr(task_encoder, name))
        energon/task_encoder/encoder.py: getattr(DefaultTaskEncoder, hook, None)
        energon/task_encoder/encoder.py: getattr(TaskEncoder, hook)
        energon/task_encoder/encoder.py: getattr(encoder, settings[hook], None)
        energon/task_encoder/encoder.py: getattr(marked, name, None)
        energon/task_encoder/encoder.py: getattr(self, name)
        energon/task_encoder/encoder.py: getattr(type(encoder), hook)
    """,
    "a fixed name": """
        energon/decode/sample_decoder.py: methodcaller('decode', 'utf-8')
        energon/loader/transport/pickling.py: hasattr(kind, name)
        energon/samples/collate.py: attrgetter('shape')
        energon/samples/collate.py: find_spec('torch')
    """,
    "written by a process of the same program": """
        energon/inspect/lint_batch.py: pickle.loads(leaf)
        energon/inspect/measure.py: pickle.loads(packed)
        energon/loader/processes/main.py: pickle.loads(read_shared(description))
        energon/loader/processes/main.py: pickle.loads(read_shared(opening.descriptors[0]))
        energon/loader/processes/main.py: pickle.loads(self._pipeline_bytes)
        energon/loader/ray_actors/actor.py: importlib.import_module(name)
        energon/loader/ray_actors/actor.py: pickle.loads(content)
        energon/loader/ray_actors/actor.py: pickle.loads(setup)
        energon/loader/replicas/peer.py: pickle.loads(data)
        energon/loader/replicas/peer.py: pickle.loads(received[start:start + number])
        energon/loader/replicas/replica_worker.py: pickle.loads(values)
        energon/loader/transport/events.py: pickle.loads(pickled, buffers=buffers)
        energon/loader/transport/pickling.py: getattr(owner, name)
        energon/loader/transport/pickling.py: sys.modules[module]
        energon/loader/transport/reports.py: pickle.loads(pickled)
        energon/prepare/writers/pack.py: pickle.load(file)
    """,
    "only where the user allows it by name": """
        energon/decode/sample_decoder.py: pickle.loads(data)
        energon/decode/values.py: torch.load(io.BytesIO(data), map_location='cpu', weights_only=not trusted)
        energon/samples/sample_types.py: getattr(value, step)
        energon/samples/sample_types.py: hasattr(value, step)
        energon/samples/sample_types.py: import_module(module)
        energon/task_encoder/load.py: compile(text, origin, 'exec')
        energon/task_encoder/load.py: exec(compile(text, origin, 'exec'), module.__dict__)
        energon/task_encoder/load.py: getattr(self._module, self.name)
        energon/task_encoder/load.py: getattr(self._module, self.name, None)
        energon/task_encoder/load.py: sys.modules[module.__name__]
        energon/webdataset/autodecode.py: pickle.loads(data)
        energon/webdataset/filters.py: pickle.load(stream)
        energon_mds/records.py: pickle.loads(content)
    """,  # noqa: E501
    "the command line names it": """
        energon/arguments.py: getattr(value, step)
        energon/arguments.py: import_module(module)
    """,
    "the calling program names it": """
        energon/loader/replicas/context_parallel.py: getattr(batch, name)
        energon/loader/replicas/context_parallel.py: setattr(changed, name, part)
        energon/webdataset/utils.py: eval(expr.format(s))
        energon/webdataset/utils.py: getattr(importlib.import_module(module), sym, None)
        energon/webdataset/utils.py: importlib.import_module(module)
    """,
    "taken only if it is a dtype": "energon/cache/contents.py: vars(torch).get(name)",
    "written by a process of the same program: states that are saved are JSON": """
        energon/loader/state.py: pickle.loads(self.state)
    """,
    "plain data only": """
        energon/loader/state_files.py: torch.load(io.BytesIO(data), map_location='cpu', weights_only=True)
    """,  # noqa: E501
    "names of parts are literals in it, fields are identifiers": """
        energon/samples/field_map.py: exec(source, namespace)
    """,
    "the resolver: taken only if it is a class of samples": """
        energon/samples/sample_types.py: sys.modules.get(module)
    """,
    "no names of the data are in it": """
        energon/sources/shard_samples.py: eval(f'lambda {columns}: [{loop}]')
    """,
    "names of parts are literals in it": """
        energon/sources/shard_samples.py: eval(source, dict(_OF_ROWS))
    """,
}
"""Files below `src`, and places in them, by the reason."""


def test_every_lookup_by_a_name_that_is_not_written_there_has_a_reason():
    modules = [*source_modules(), *modules_in(ROOT / "plugins/energon-mds/src")]
    found = {(each.path, place) for each in modules for place in each.lookups}
    lines = [line.strip() for places in PLACES.values() for line in places.strip().splitlines()]
    known = {tuple(line.split(": ", 1)) for line in lines}
    assert len(known) == len(lines)
    assert sorted(found - known) == [], "use resolve_class, or say why no data decide on it"
    assert sorted(known - found) == [], "is there no longer: take it out of the table"


def test_the_check_sees_what_it_has_to_see(tmp_path):
    seen = [
        "getattr(module, name)",
        "builtins.getattr(module, name)",
        "importlib.import_module(text)",
        "__import__(text)",
        "sys.modules[text]",
        "sys.modules.get(text)",
        "globals()[text]",
        "module.__dict__[text]",
        "vars(module)[text]",
        "operator.attrgetter(text)",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "pickle.loads(data)",
        "torch.load(file)",
        "pkgutil.resolve_name(text)",
    ]
    passed_over = [
        "getattr(value, 'shape')",
        "re.compile(text)",
        "json.loads(text)",
        "sys.modules['torch']",
        "vars(self).update(given)",
        "yaml.load(text)",
    ]
    (tmp_path / "m.py").write_text("\n".join([*seen, *passed_over]))
    (module,) = modules_in(tmp_path)
    assert module.lookups == {*seen}
