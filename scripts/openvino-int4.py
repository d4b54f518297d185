"""A model for scripts/race.sh: openvino-int4.py GGUF DIRECTORY

Turns a GGUF of f16 weights into an OpenVINO model with 4-bit symmetric weights in groups of 128 (embedding and output matrix
in 8 bits, as `optimum-cli export openvino --weight-format int4 --group-size 128 --ratio 1.0 --sym` does). Needs nncf.
"""

import pathlib
import shutil
import sys

import nncf
import openvino
import openvino_genai

gguf, directory = map(pathlib.Path, sys.argv[1:])
# The pipeline leaves what it made of the GGUF beside it.
openvino_genai.LLMPipeline(gguf, "CPU", enable_save_ov_model=True)
made = list(gguf.parent.glob("openvino_*.*"))
model = openvino.Core().read_model(gguf.parent / "openvino_model.xml")
mode = nncf.CompressWeightsMode.INT4_SYM
model = nncf.compress_weights(model, mode=mode, group_size=128, ratio=1.0)
directory.mkdir()
openvino.save_model(model, directory / "openvino_model.xml")
del model
for file in made:
    if file.stem == "openvino_model":
        file.unlink()
    else:
        shutil.move(file, directory)
