"""The files of a prepared dataset, under the names of `flavors.webdataset.config`."""

from __future__ import annotations

from energon.formats.meta.info import META

MAIN_FOLDER_NAME = META
INDEX_SQLITE_FILENAME = "index.sqlite"
INDEX_UUID_FILENAME = "index.uuid"
INFO_JSON_FILENAME = ".info.json"
INFO_YAML_FILENAME = ".info.yaml"
SPLIT_YAML_FILENAME = "split.yaml"
