"""Export the demo model as a Hugging Face folder, then use it with transformers.

pip install '.[hf]'
python examples/huggingface_export.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import fastweights as fw
from fastweights.huggingface.folder import write_folder

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
write_folder("demo", folder)

model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
prompts = ["The film was released in", "In 1920"]
rows = tokenizer(prompts, return_tensors="pt", padding=True)
for text in tokenizer.batch_decode(model.generate(**rows, max_new_tokens=20, num_beams=3), skip_special_tokens=True):
    print(text)

greedy = tokenizer.decode(model.generate(**tokenizer(prompts[0], return_tensors="pt"), max_new_tokens=20)[0])
print("the same as without transformers:", greedy == fw.load("demo").generate(prompts[0], tokens=20, temperature=0))
