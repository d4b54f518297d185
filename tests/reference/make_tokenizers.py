#!/usr/bin/env python3
"""Makes tests/fixtures/tokenizers: the files of small tokenizers without tokenizer.json, and the ids that the libraries
which read these files give to difficult texts.

Every case is a folder with config.json (the type of the model alone), the files of the tokenizer, and golden.json. The
vocabularies are trained here, on tests/text. golden.json has the form of those of the models: for each text `ids` with
the tokens around a text, `ids_no_special` without them, and `decoded`, the text of the latter.

The ids come from the library that defines the file: sentencepiece, tiktoken or mistral-common. None of them finds
special tokens in a text. As the slow tokenizers of transformers did, a text is divided at these tokens here, and the
library encodes the parts. Cases without such a library (vocab.json), and the newer rules of Llama, are encoded by
transformers, which reads the files itself.

`transformers` in golden.json lists the texts to which AutoTokenizer of transformers gives other ids from the same files,
with these ids; the decision about made tokenizers explains the differences.

    python3 -m venv venv && venv/bin/pip install -r tests/reference/tokenizers.txt
    venv/bin/python tests/reference/make_tokenizers.py tests/text tests/fixtures/tokenizers

The same machine writes the same bytes again.
"""

import base64
import io
import json
import logging
import re
import sys
import tempfile
import unicodedata
from importlib.metadata import version
from pathlib import Path

import sentencepiece
import tiktoken
import zstandard
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from sentencepiece import sentencepiece_model_pb2 as spm
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers import Qwen3_5Tokenizer
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

TEXTS = [
    "",
    " ",
    "   ",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "trailing spaces   ",
    "two  spaces, three   spaces, and nine         spaces",
    "      six spaces before",
    "\tone tab and\t\ttwo tabs",
    "a line\nanother\r\nand\r\n\r\nempty ones\n\n\nend\n",
    "\n",
    "\n\n  \n\t\n",
    "spaces before the end   \n   and after it",
    "I'll say it's what they've had; we'd, you're, I'm, DON'T, CAN'T",
    "0 1 12 123 1234 12345 3.14159 1,000,000 ２３ Ⅷ ½ ²³",
    "café naïve Ångström résumé",
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m",
    "x\u0301\u0302\u0303 q\u0323\u0307 \u0301alone",
    "ﬁne ﬂow ﷺ ㍿ ＦＵＬＬ Ｗｉｄｔｈ ｶﾀｶﾅ ①②",
    "中文分词测试，你好世界！",
    "日本語のテキスト、ひらがなとカタカナ。",
    "한국어 텍스트 가각힣",
    "漢字mixed中文with英語text123和数字",
    "Привет, мир! Ελληνικά العربية עברית हिन्दी ไทย",
    "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 ❤️",
    "zero\u200bwidth\u200djoiner\u2060 soft\u00adhyphen nbsp\u00a0here \u2003em",
    "\u0000nul\u0001\u0007\u001b[0m\u007f\u0085\u2028\u2029\ufeff",
    "private \ue000\uf8ff and rare 𐍈𒀀𠜎 \U000e0001\U0010ffff \ufffd",
    "▁ lower ▁one eighth▁block▁▁▁",
    "<0x0A> <0x41><0xFF> <unk> [UNK]",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x**2}  # comment\n\n\nclass A:\n\tpass",
    "https://example.com/path?q=a%20b&c=d#frag user@example.org",
    "!!!???...---===___***///\\\\\\|||~~~```",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "Mixed CASE WordsLikeThis and_snake_case and-kebab-case HTTPServer2Go",
    "Once upon a time there was a little girl. She said: \u201cLet\u2019s play!\u201d \u2014 and ran\u2026",
]


def special_texts(tokens):
    """Texts with special tokens in every position."""
    first, last = tokens[0], tokens[-1]
    return [
        first,
        f"{first}text",
        f"text{last}",
        f"one{first}two {last} three",
        f"{first}{last}{first}",
        f" {first} Hello {last} ",
        f"{first[:-1]} {last[1:]} {first.upper()}",
        "".join(tokens),
    ]


class Slow:
    """A tokenizer that divides texts at special tokens and encodes the parts by itself."""

    def __init__(self, encode, decode, special, before=(), after=()):
        self.encode_part, self.decode, self.special = encode, decode, special
        self.before, self.after = list(before), list(after)
        longest_first = sorted(special, key=len, reverse=True)
        self.pattern = re.compile("|".join(re.escape(token) for token in longest_first))

    def ids(self, text):
        ids, at = [], 0
        for match in self.pattern.finditer(text):
            ids += self.encode_part(text[at : match.start()]) if match.start() > at else []
            ids.append(self.special[match.group()])
            at = match.end()
        return ids + (self.encode_part(text[at:]) if at < len(text) else [])

    def case(self, text):
        ids = self.ids(text)
        return {
            "text": text,
            "ids": self.before + ids + self.after,
            "ids_no_special": ids,
            "decoded": self.decode(ids),
        }


class Fast:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer, special, before=(), after=()):
        self.tokenizer, self.special = tokenizer, special
        self.before, self.after = list(before), list(after)

    def case(self, text):
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        decoded = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return {
            "text": text,
            "ids": self.before + ids + self.after,
            "ids_no_special": ids,
            "decoded": decoded,
        }


def write(out, name, files, reference, transformers, without=()):
    """Writes a case: its files, and what the reference gives to all texts but those that contain one of `without`."""
    folder = out / name
    folder.mkdir(parents=True)
    for file, content in files.items():
        content = content if isinstance(content, bytes) else json.dumps(content, indent=1).encode()
        put(folder / file, content)
    texts = [text for text in TEXTS if not any(part in text for part in without)]
    cases = [reference.case(text) for text in texts + special_texts(list(reference.special))]
    golden = {"made_by": made_by(), "tokenization": cases, "transformers": []}
    for case in cases if transformers is not None else []:
        ids = transformers.encode(case["text"], add_special_tokens=False)
        if ids != case["ids_no_special"]:
            golden["transformers"].append({"text": case["text"], "ids_no_special": ids})
    print(f"{name}: {len(cases)} texts, other ids in transformers: {len(golden['transformers'])}")
    for case in golden["transformers"]:
        print(f"    {case['text']!r}")
    put(folder / "golden.json", json.dumps(golden, ensure_ascii=False, separators=(",", ":")).encode())


def put(path, content):
    """Writes a file, compressed if that makes it much smaller."""
    packed = zstandard.ZstdCompressor(level=19).compress(content)
    if len(packed) < len(content) * 0.8 and len(content) > 1000:
        path, content = path.with_name(path.name + ".zst"), packed
    path.write_bytes(content)


def made_by():
    names = ["transformers", "tokenizers", "sentencepiece", "tiktoken", "mistral-common"]
    return " ".join(f"{name} {version(name)}" for name in names)


def auto(files):
    """Opens the files with AutoTokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            (Path(folder) / file).write_bytes(content)
        return AutoTokenizer.from_pretrained(folder, mistral_format=False)


def train(corpus, **options):
    """Trains a model of sentencepiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus.splitlines()),
        model_writer=model,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    # The trainer records paths and options that change no ids.
    proto = spm.ModelProto.FromString(model.getvalue())
    proto.trainer_spec.ClearField("input")
    return proto.SerializeToString(deterministic=True)


def sentence_piece(model, special, bos=None, eos=None):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    known = {token: processor.piece_to_id(token) for token in special if isinstance(token, str)}
    known |= {token: number for token, number in (special.items() if isinstance(special, dict) else [])}
    texts = {number: token for token, number in known.items()}

    def decode(ids):
        # Special tokens are shown as they are; sentencepiece decodes what lies between them.
        text, part, first = "", [], True
        for number in [*ids, None]:
            if number in texts or number is None:
                decoded = processor.decode(part)
                if part and not first and processor.id_to_piece(part[0]).startswith("▁") and prefix(model):
                    decoded = " " + decoded
                text += decoded + texts.get(number, "")
                part, first = [], False
            else:
                part.append(number)
        return text

    frame = lambda token: [known[token]] if token else []
    return Slow(lambda text: processor.encode(text), decode, known, frame(bos), frame(eos))


def prefix(model):
    return spm.ModelProto.FromString(model).normalizer_spec.add_dummy_prefix


def llama_cases(out, corpus):
    exact = dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    bpe = train(corpus, model_type="bpe", vocab_size=620, byte_fallback=True, split_digits=True,
                allow_whitespace_only_pieces=True, **exact)
    config = {"model_type": "llama"}
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
                "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": True}
    added = {"<|im_start|>": 620, "<|im_end|>": 621}
    files = {"config.json": config, "tokenizer.model": bpe, "tokenizer_config.json": settings, "added_tokens.json": added}
    special = {"<s>": 1, "</s>": 2, "<unk>": 0} | added
    write(out, "llama", files, sentence_piece(bpe, special, bos="<s>"), auto(files))

    decoder = {"620": {"content": "<|user|>", "rstrip": True, "special": False, "normalized": True},
               "621": {"content": "<|end|>", "lstrip": True, "special": True}}
    settings = settings | {"legacy": False, "added_tokens_decoder": decoder}
    files = {"config.json": config, "tokenizer.model": bpe,
             "tokenizer_config.json": settings}
    tokenizer = auto(files)
    special = {"<s>": 1, "</s>": 2, "<unk>": 0, "<|user|>": 620, "<|end|>": 621}
    write(out, "llama-first", files, Fast(tokenizer, special, before=[1]), None)

    # As OpenLLaMA: characters are normalized, and extra spaces are removed.
    nfkc = train(corpus, model_type="bpe", vocab_size=600, byte_fallback=True, normalization_rule_name="nfkc")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    files = {"config.json": config, "tokenizer.model": nfkc, "tokenizer_config.json": settings}
    special = {"<s>": 1, "</s>": 2, "<unk>": 0}
    # Of several spaces at the beginning, tokenizers removes one in the decoded text, sentencepiece all.
    write(out, "llama-nfkc", files, sentence_piece(nfkc, special, bos="<s>"), auto(files), without=["▁ lower"])

    unigram = train(corpus, model_type="unigram", vocab_size=600, byte_fallback=True,
                    normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=False)
    files = {"config.json": {"model_type": "mistral"}, "tokenizer.model": unigram}
    # The unigram model of tokenizers finds the tokens of bytes in a text, and its map of characters takes "\\r\\n" as one.
    write(out, "mistral-unigram", files, sentence_piece(unigram, special, bos="<s>"), auto(files),
          without=["<0x0A>", "\r\n"])


def gemma_case(out, corpus):
    symbols = ["<mask>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "\t\t", "<h1>"]
    model = train(corpus, model_type="bpe", vocab_size=600, byte_fallback=True, split_digits=True,
                  allow_whitespace_only_pieces=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
                  add_dummy_prefix=False, user_defined_symbols=symbols, pad_id=0, eos_id=1, bos_id=2, unk_id=3,
                  pad_piece="<pad>", eos_piece="<eos>", bos_piece="<bos>")
    settings = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "bos_token": "<bos>", "eos_token": "<eos>",
                "unk_token": "<unk>", "pad_token": "<pad>",
                "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]}
    files = {"config.json": {"model_type": "gemma2"}, "tokenizer.model": model, "tokenizer_config.json": settings}
    special = ["<bos>", "<start_of_turn>", "<end_of_turn>", "<unk>", "<eos>", "<pad>"]
    write(out, "gemma", files, sentence_piece(model, special, bos="<bos>"), auto(files))


def t5_case(out, corpus):
    model = train(corpus, model_type="unigram", vocab_size=600, normalization_rule_name="nmt_nfkc",
                  pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    settings = {"tokenizer_class": "T5Tokenizer", "extra_ids": 3, "eos_token": "</s>", "unk_token": "<unk>",
                "pad_token": "<pad>"}
    files = {"config.json": {"model_type": "llama"}, "tokenizer.model": model, "tokenizer_config.json": settings}
    special = {"</s>": 1, "<unk>": 2, "<pad>": 0, "<extra_id_2>": 600, "<extra_id_1>": 601, "<extra_id_0>": 602}
    write(out, "t5", files, sentence_piece(model, special, eos="</s>"), None)


def byte_level(corpus, pattern, size):
    """Trains byte-level BPE; returns its vocabulary and merges."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                  show_progress=False)
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
LETTERS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
KIMI = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{LETTERS[0]}&&[^\p{{Han}}]]*[{LETTERS[1]}&&[^\p{{Han}}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{LETTERS[0]}&&[^\p{{Han}}]]+[{LETTERS[1]}&&[^\p{{Han}}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])
TEKKEN = "|".join([
    rf"[^\r\n\p{{L}}\p{{N}}]?[{LETTERS[0]}]*[{LETTERS[1]}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{LETTERS[0]}]+[{LETTERS[1]}]*",
    r"\p{N}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])


def listed_cases(out, corpus):
    def files(model_type, vocab, merges, settings):
        text = "#version: 0.2\n" + "".join(merge + "\n" for merge in merges)
        return {"config.json": {"model_type": model_type}, "vocab.json": json.dumps(vocab, ensure_ascii=False).encode(),
                "merges.txt": text.encode(), "tokenizer_config.json": settings}

    vocab, merges = byte_level(corpus, GPT2, 599)
    case = files("llama", vocab | {"<|endoftext|>": 599}, merges, {"tokenizer_class": "GPT2Tokenizer"})
    write(out, "gpt2", case, Fast(auto(case), {"<|endoftext|>": 599}), None)

    vocab, merges = byte_level(corpus, QWEN2, 600)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
    decoder = {str(600 + i): {"content": name, "special": i < 3} for i, name in enumerate(names)}
    settings = {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "unk_token": None, "bos_token": None, "additional_special_tokens": names[1:3]}
    special = {name: 600 + i for i, name in enumerate(names)}
    case = files("qwen2", vocab, merges, settings | {"tokenizer_class": "Qwen2Tokenizer"})
    write(out, "qwen2", case, Fast(auto(case), special), None)
    case = files("qwen3_5_text", vocab, merges, settings | {"tokenizer_class": "Qwen3_5Tokenizer"})
    # AutoTokenizer does not read vocab.json for this class.
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Qwen3_5Tokenizer(vocab, pairs)
    tokenizer.add_tokens([AddedToken(name, special=i < 3, normalized=False) for i, name in enumerate(names)])
    assert all(tokenizer.convert_tokens_to_ids(name) == number for name, number in special.items())
    write(out, "qwen35", case, Fast(tokenizer, special), None)


def ranks(vocab):
    """Returns the bytes of the tokens of byte-level BPE, in the order of their ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return [bytes(byte_of[char] for char in token) for token in sorted(vocab, key=vocab.get)]


def tiktoken_file(tokens):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def tiktoken_cases(out, corpus):
    def case(name, model_type, file, pattern, settings, special, before=(), nfc=False):
        tokens = ranks(byte_level(corpus, pattern.replace("&&[^\\p{Han}]", ""), 600)[0])
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks={t: i for i, t in enumerate(tokens)},
                                     special_tokens=special)
        normal = (lambda text: unicodedata.normalize("NFC", text)) if nfc else (lambda text: text)
        encode = lambda text: encoding.encode(normal(text), disallowed_special=())
        files = {"config.json": {"model_type": model_type}, file: tiktoken_file(tokens)}
        files |= {"tokenizer_config.json": settings} if settings else {}
        write(out, name, files, Slow(encode, encoding.decode, special, [special[token] for token in before]), None)

    decoder = {"600": "[BOS]", "601": "[EOS]", "602": "<|im_end|>", "604": "<|im_user|>", "857": "[PAD]"}
    listed = {number: {"content": text, "special": True} for number, text in decoder.items()}
    settings = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed, "bos_token": "[BOS]",
                "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": None}
    special = {decoder.get(str(i), f"<|reserved_token_{i}|>"): i for i in range(600, 858)}
    case("kimi", "kimi_k2", "tiktoken.model", KIMI, settings, special)

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [f"<|extra_{i}|>" for i in range(205)]
    special = {name: 600 + i for i, name in enumerate(names)}
    case("qwen", "llama", "qwen.tiktoken", QWEN2, {"tokenizer_class": "QWenTokenizer"}, special, nfc=True)

    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    listed = {str(600 + i): {"content": name, "special": True} for i, name in enumerate(names)}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": names[0], "eos_token": names[1],
                "added_tokens_decoder": listed}
    special = {name: 600 + i for i, name in enumerate(names)}
    case("llama3", "llama", "tokenizer.model", LLAMA3, settings, special, before=names[:1])


def tekken_cases(out, corpus):
    tokens = ranks(byte_level(corpus, TEKKEN, 600)[0])
    # mistral-common expects the 256 bytes first, in order.
    tokens = [bytes([byte]) for byte in range(256)] + [token for token in tokens if len(token) > 1]
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode(errors="ignore") or None}
             for i, t in enumerate(tokens)]

    def case(name, names, settings):
        count = settings.get("default_num_special_tokens", len(names))
        config = {"pattern": TEKKEN, "num_vocab_tokens": len(vocab), "version": "v7"} | settings
        content = {"config": config, "vocab": vocab}
        if name != "tekken-old":
            content["special_tokens"] = [{"rank": i, "token_str": token, "is_control": True}
                                         for i, token in enumerate(names)]
        else:
            config["version"] = "v3"
        file = json.dumps(content).encode()
        files = {"config.json": {"model_type": "mistral"}, "tekken.json": file}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tekken.json"
            path.write_bytes(file)
            tekkenizer, fast = Tekkenizer.from_file(path), convert_tekken_tokenizer(str(path))
        special = {token: i for i, token in enumerate(names)} | {f"<SPECIAL_{count - 1}>": count - 1}
        encode = lambda text: tekkenizer.encode(text, bos=False, eos=False)
        write(out, name, files, Slow(encode, lambda ids: fast.decode(ids, skip_special_tokens=False), special, [1]), fast)

    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<pad>"]
    case("tekken", names, {"default_vocab_size": 590, "default_num_special_tokens": 16})
    old = [str(getattr(token["token_str"], "value", token["token_str"])) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    case("tekken-old", old, {"default_vocab_size": 600, "default_num_special_tokens": 40})


def main():
    texts, out = Path(sys.argv[1]), Path(sys.argv[2])
    logging.disable(logging.WARNING)
    names = ["tinystories_valid_30k.txt", "heldback_sherlock_40k.txt"]
    corpus = "\n".join((texts / name).read_text(encoding="utf-8") for name in names)
    corpus += "\nمرحبا Привет, мир! 你好，世界。 日本語のテキスト café naïve Ångström 123 4567 😀 👍\n" * 20
    llama_cases(out, corpus)
    gemma_case(out, corpus)
    t5_case(out, corpus)
    listed_cases(out, corpus)
    tiktoken_cases(out, corpus)
    tekken_cases(out, corpus)


main()
