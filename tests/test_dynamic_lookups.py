"""No text of a document becomes a Python object but in `samples/sample_types.py`.

A static check: every place of the source that looks something up by a name that is not written
there, imports or runs what it is given, or unpickles, is in the table below with the reason why
no data decide on it. A new place either uses `resolve_class`, or gets a line and a reason.
"""

from __future__ import annotations

from tests.source_modules import ROOT, modules_in, source_modules

TABLE = "names from a table in the code"
FIELDS = "names of fields, which a class declares"
HOOKS = "names of hooks, from the code"
TORCH = "a fixed name"
PROCESSES = "written by a process of the same program"
ALLOWED = "only where the user allows it by name"
COMMAND_LINE = "the command line names it"
PROGRAM = "the calling program names it"

REASONS = {
    "energon/__init__.py": {
        "getattr(import_module(_HOME[name]), name)": TABLE,
        "globals()[name]": TABLE,
        "import_module(_HOME[name])": TABLE,
    },
    "energon/cache/contents.py": {
        "vars(torch).get(name)": "taken only if it is a dtype",
    },
    "energon/cli/main.py": {
        "getattr(import_module(home), attribute)": TABLE,
        "import_module(home)": TABLE,
    },
    "energon/arguments.py": {
        "getattr(value, step)": COMMAND_LINE,
        "import_module(module)": COMMAND_LINE,
    },
    "energon/cli/preview.py": {
        "getattr(sample, each.name)": FIELDS,
    },
    "energon/compat/megatron/datasets/webdataset.py": {
        "getattr(type(self), name, None)": TABLE,
        "vars(self)[name]": FIELDS,
    },
    "energon/compat/megatron/encoder.py": {
        "getattr(AugmentTaskEncoder, name)": HOOKS,
        "getattr(dataset, each.name)": FIELDS,
        "getattr(TaskEncoder, builder)": HOOKS,
        "getattr(TaskEncoder, name)": HOOKS,
        "getattr(core.TaskEncoder, name)": HOOKS,
        "getattr(inner, name)": HOOKS,
        "getattr(self, name)": HOOKS,
        "getattr(self.task_encoder, name)": HOOKS,
        "getattr(task_encoder, name)": HOOKS,
        "getattr(type(encoder), builder, None)": HOOKS,
        "getattr(type(self), name)": HOOKS,
        "getattr(type(self), name, None)": HOOKS,
        "hasattr(inner, name)": HOOKS,
        "setattr(AugmentTaskEncoder, _name, _delegate(_name))": HOOKS,
        "setattr(self, name, getattr(task_encoder, name))": HOOKS,
    },
    "energon/compat/megatron/finder.py": {
        "getattr(import_module(self.module), self.name)": TABLE,
        "import_module(self.module)": TABLE,
        "import_module(f'{ROOT}.edataclass')": TABLE,
        "import_module(f'{module.__name__}.{name}')": TABLE,
        "setattr(module, name, value)": TABLE,
    },
    "energon/compat/megatron/getters.py": {
        "getattr(core, _name)": TABLE,
        "globals()[_name]": TABLE,
        "globals()[name]": TABLE,
    },
    "energon/compat/megatron/datasets/others.py": {"globals()[name]": TABLE},
    "energon/compat/megatron/wrappers/streams.py": {
        "getattr(self, name)": FIELDS,
        "setattr(self, name, _saved(value))": FIELDS,
    },
    "energon/compat/megatron/wrappers/own.py": {
        "getattr(self, name)": FIELDS,
        "getattr(self._dataset, name)": FIELDS,
        "setattr(self, name, state[name])": FIELDS,
        "vars(mine)[name]": FIELDS,
    },
    "energon/decode/values.py": {
        "torch.load(io.BytesIO(data), map_location='cpu', weights_only=not trusted)": ALLOWED,
    },
    "energon/decode/sample_decoder.py": {
        "methodcaller('decode', 'utf-8')": TORCH,
        "pickle.loads(data)": ALLOWED,
    },
    "energon/inspect/lint_batch.py": {
        "pickle.loads(leaf)": PROCESSES,
    },
    "energon/inspect/measure.py": {
        "pickle.loads(packed)": PROCESSES,
    },
    "energon/io/files.py": {
        "getattr(import_module(f'energon.io.{module}'), name)": TABLE,
        "import_module(f'energon.io.{module}')": TABLE,
    },
    "energon/loader/monitoring/accounts.py": {
        "setattr(stage_times, _FIELDS[kind], number)": FIELDS,
    },
    "energon/loader/processes/start.py": {
        "importlib.import_module(name)": TABLE,
    },
    "energon/loader/options.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/loader/state.py": {
        "pickle.loads(self.state)": PROCESSES + ": states that are saved are JSON",
    },
    "energon/loader/state_files.py": {
        "torch.load(io.BytesIO(data), map_location='cpu', weights_only=True)": "plain data only",
    },
    "energon/loader/transport/pickling.py": {
        "getattr(found, name)": PROCESSES,
        "getattr(value, name)": FIELDS,
        "hasattr(kind, name)": TORCH,
        "hasattr(value, name)": FIELDS,
        "sys.modules[module]": PROCESSES,
    },
    "energon/loader/transport/reports.py": {
        "pickle.loads(pickled)": PROCESSES,
    },
    "energon/loader/replicas/context_parallel.py": {
        "getattr(batch, name)": PROGRAM,
        "setattr(changed, name, part)": PROGRAM,
    },
    "energon/loader/replicas/peer.py": {
        "pickle.loads(data)": PROCESSES,
        "pickle.loads(received[start:start + number])": PROCESSES,
    },
    "energon/loader/replicas/replica_worker.py": {"pickle.loads(values)": PROCESSES},
    "energon/loader/ray_actors/actor.py": {
        "importlib.import_module(name)": PROCESSES,
        "pickle.loads(content)": PROCESSES,
        "pickle.loads(setup)": PROCESSES,
    },
    "energon/loader/transport/events.py": {
        "pickle.loads(pickled, buffers=buffers)": PROCESSES,
    },
    "energon/loader/processes/main.py": {
        "pickle.loads(read_shared(description))": PROCESSES,
        "pickle.loads(read_shared(opening.descriptors[0]))": PROCESSES,
        "pickle.loads(self._pipeline_bytes)": PROCESSES,
    },
    "energon/metadataset/grammar.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/metadataset/resolve.py": {
        "getattr(node, key)": FIELDS,
    },
    "energon/plan/balance.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/plan/blends/blend.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/plan/leaves/leaf_order.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/plan/line.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/plan/recipe.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/prepare/writers/pack.py": {
        "pickle.load(file)": PROCESSES,
    },
    "energon_mds/records.py": {
        "pickle.loads(content)": ALLOWED,
    },
    "energon/metadataset/kind.py": {
        "getattr(import_module(module), attribute)": TABLE,
        "import_module(module)": TABLE,
    },
    "energon/samples/collate.py": {
        "attrgetter('name')": FIELDS,
        "attrgetter('shape')": TORCH,
        "find_spec('torch')": TORCH,
        "getattr(item, name, None)": FIELDS,
        "getattr(each, name)": FIELDS,
        "getattr(value, name)": FIELDS,
    },
    "energon/samples/field_map.py": {
        "exec(source, namespace)": "names of parts are literals in it, fields are identifiers",
    },
    "energon/samples/sample_types.py": {
        "getattr(sample, name)": FIELDS,
        "getattr(value, step)": ALLOWED,
        "hasattr(value, step)": ALLOWED,
        "import_module(module)": ALLOWED,
        "sys.modules.get(module)": "the resolver: taken only if it is a class of samples",
    },
    "energon/samples/sample.py": {
        "getattr(sample, name)": FIELDS,
        "getattr(self, name)": FIELDS,
        "getattr(self, name, None)": FIELDS,
        "getattr(value, name)": FIELDS,
    },
    "energon/sources/measures.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/sources/shard_samples.py": {
        "eval(f'lambda {columns}: [{loop}]')": "no names of the data are in it",
        "eval(source, dict(_OF_ROWS))": "names of parts are literals in it",
    },
    "energon/sources/tables/token_files.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/task_encoder/cooker.py": {
        "getattr(cooker, f'need_{name}')": TABLE,
    },
    "energon/task_encoder/dataset.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/task_encoder/encoder.py": {
        "getattr(DefaultTaskEncoder, hook, None)": HOOKS,
        "getattr(TaskEncoder, hook)": HOOKS,
        "getattr(encoder, settings[hook], None)": HOOKS,
        "getattr(marked, name, None)": HOOKS,
        "getattr(self, name)": HOOKS,
        "getattr(type(encoder), hook)": HOOKS,
    },
    "energon/task_encoder/train_plan.py": {
        "getattr(settings, name)": FIELDS,
    },
    "energon/task_encoder/load.py": {
        "compile(text, origin, 'exec')": ALLOWED,
        "exec(compile(text, origin, 'exec'), module.__dict__)": ALLOWED,
        "getattr(self._module, self.name)": ALLOWED,
        "getattr(self._module, self.name, None)": ALLOWED,
        "sys.modules[module.__name__]": ALLOWED,
    },
    "energon/viewer/run_pages.py": {
        "getattr(batch, each.name)": FIELDS,
    },
    "energon/viewer/parts.py": {
        "getattr(value, each.name)": FIELDS,
    },
    "energon/webdataset/__init__.py": {"globals()[name]": TABLE},
    "energon/webdataset/autodecode.py": {
        "pickle.loads(data)": ALLOWED,
    },
    "energon/webdataset/dataset_spec.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/webdataset/filters.py": {
        "globals()[f'_{_make.__name__}']": TABLE,
        "pickle.load(stream)": ALLOWED,
    },
    "energon/webdataset/mix.py": {
        "getattr(mix.pipeline[0], self._name)": FIELDS,
        "setattr(mix.pipeline[0], self._name, value)": FIELDS,
    },
    "energon/webdataset/names.py": {
        "getattr(import_module(home), name)": TABLE,
        "import_module(f'{PACKAGE}.{name}')": TABLE,
        "import_module(home)": TABLE,
    },
    "energon/webdataset/stages/base.py": {
        "getattr(self, name)": FIELDS,
    },
    "energon/webdataset/utils.py": {
        "eval(expr.format(s))": PROGRAM,
        "getattr(importlib.import_module(module), sym, None)": PROGRAM,
        "importlib.import_module(module)": PROGRAM,
    },
    "megatron/energon/__init__.py": {
        "sys.modules[__name__]": TABLE,
    },
    "energon/worker.py": {
        "getattr(self, name)": FIELDS,
    },
}


def test_every_lookup_by_a_name_that_is_not_written_there_has_a_reason():
    modules = [*source_modules(), *modules_in(ROOT / "plugins/energon-mds/src")]
    found = {(each.path, place) for each in modules for place in each.lookups}
    known = {(file, place) for file, places in REASONS.items() for place in places}
    assert sorted(found - known) == [], "use resolve_class, or say why no data decide on it"
    assert sorted(known - found) == [], "is there no longer: take it out of the table"
    assert all(reason for places in REASONS.values() for reason in places.values())


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
