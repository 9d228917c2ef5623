#!/usr/bin/env bash
# Make the environment that the peers run in. Usage: benchmarks/peers.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv-peers}
test -x "$folder/bin/python" || python3 -m venv "$folder"
# torch first and pinned, and torchvision with it: newer ones bring gigabytes of CUDA packages.
"$folder/bin/pip" install --quiet torch==2.13.0 torchvision==0.28.0
"$folder/bin/pip" install --quiet megatron-energon==7.4.1 webdataset==1.0.2 litdata==0.2.76 simplejpeg==1.9.0 av==18.1.0 pillow pyzmq msgpack opencv-python-headless==5.0.0.93
# The processor of benchmarks/programs.py, and a dependency of ours, which runs here as well.
"$folder/bin/pip" install --quiet transformers==4.57.1 cloudpickle
# The sampler of benchmarks/balance.py, which is newer than that processor may be.
test -d "$folder/transformers-5.24.0" ||
    "$folder/bin/pip" install --quiet --target "$folder/transformers-5.24.0" transformers==5.24.0
# Earlier releases that programs pin, each in a folder of its own.
for version in 0.2.86 0.2.111; do
    test -d "$folder/webdataset-$version/webdataset" ||
        "$folder/bin/pip" install --quiet --no-deps --target "$folder/webdataset-$version" "webdataset==$version"
done
for version in 5.0.0 5.2.0 6.0.0; do
    test -d "$folder/megatron.energon-$version/megatron" ||
        "$folder/bin/pip" install --quiet --no-deps --target "$folder/megatron.energon-$version" "megatron-energon==$version" s3fs==0.4.2 tqdm bitstring==4.2.3 bitarray ebmlite sortedcontainers soundfile
done
