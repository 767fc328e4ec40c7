#!/usr/bin/env python3
"""Writes a checkpoint folder with the release's real layout and no data.

Every safetensors header is genuine (names, dtypes, shapes, offsets of the full-size MiniMax-M3), the data are holes, so
854 GB take a few megabytes of disk. For tests of whatever reads headers only. Formats: bf16 (59 shards), mxfp8 (31) and
nvfp4 (experts NVFP4 in ModelOpt's naming, the rest MXFP8; 48). Written from the published tensor tables alone, not from
the program's own enumeration, so that the two check each other. Needs nothing but Python.
"""
import argparse
import json
import os
import struct
import sys

HIDDEN, LAYERS, DENSE_LAYERS, EXPERTS, VOCAB = 6144, 60, 3, 128, 200064
Q, KV, HEAD, INDEX_Q = 8192, 512, 128, 512
DENSE, EXPERT = 12288, 3072
VISION, VISION_MLP, VISION_LAYERS = 1280, 5120, 32
SIZE = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
SHARDS = {"bf16": 59, "mxfp8": 31, "nvfp4": 48}


def config(fmt):
    flags = [0] * DENSE_LAYERS + [1] * (LAYERS - DENSE_LAYERS)
    compression = {"image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2}
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "attention_output_gate": False, "dense_intermediate_size": DENSE, "head_dim": HEAD, "hidden_act": "swigluoai",
        "hidden_size": HIDDEN, "intermediate_size": EXPERT, "max_position_embeddings": 1048576, "moe_layer_freq": flags,
        "n_shared_experts": 1, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": LAYERS,
        "num_key_value_heads": 4, "num_local_experts": EXPERTS, "num_mtp_modules": 7 if fmt == "bf16" else 1,
        "partial_rotary_factor": 0.5, "qk_norm_type": "per_head", "rms_norm_eps": 1e-06, "rope_theta": 5000000,
        "rotary_dim": 64, "routed_scaling_factor": 2.0, "scoring_func": "sigmoid", "shared_intermediate_size": EXPERT,
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_score_type": "max", "sparse_init_block": 0,
            "sparse_local_block": 1, "sparse_disable_index_value": flags, "sparse_attention_freq": flags},
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_gemma_norm": True,
        "use_qk_norm": True, "use_routing_bias": True, "vocab_size": VOCAB}
    top = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
        "image_token_index": 200025, "video_token_index": 200026, "image_seq_length": 576,
        "img_token_compression_config": compression, "multimodal_projector_bias": True,
        "process_image_mode": "dynamic_res", "projector_hidden_act": "gelu", "projector_hidden_size": HIDDEN,
        "text_config": text, "torch_dtype": "bfloat16", "vision_feature_layer": -1,
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": VISION, "intermediate_size": VISION_MLP,
            "num_hidden_layers": VISION_LAYERS, "num_attention_heads": 16, "patch_size": 14, "num_channels": 3,
            "image_size": 2016, "projection_dim": HIDDEN, "hidden_act": "gelu", "layer_norm_eps": 1e-05,
            "position_embedding_type": "rope", "rope_mode": "3d", "rope_theta": 10000.0,
            "vision_segment_max_frames": 4, "img_token_compression_config": compression}}
    plain = ["lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp"]
    plain += [f"language_model.model.layers.{n}.block_sparse_moe.gate" for n in range(DENSE_LAYERS, LAYERS)]
    if fmt == "mxfp8":
        top["quantization_config"] = {"quant_method": "mxfp8", "activation_scheme": "dynamic",
                                      "weight_block_size": [1, 32], "ignored_layers": plain}
    if fmt == "nvfp4":
        top["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "group_size": 16,
                                      "kv_cache_quant_algo": None, "exclude_modules": plain}
    return top


def tensors(fmt):
    """All tensors as (name, dtype, shape)."""
    out = []

    def add(name, shape, dtype="BF16"):
        out.append((name, dtype, list(shape)))

    def matrix(stem, rows, cols, routed=False):
        if fmt == "bf16":
            add(stem + ".weight", (rows, cols))
        elif fmt == "nvfp4" and routed:
            add(stem + ".weight", (rows, cols // 2), "U8")
            add(stem + ".weight_scale", (rows, cols // 16), "F8_E4M3")
            add(stem + ".weight_scale_2", (), "F32")
            add(stem + ".input_scale", (), "F32")
        else:
            add(stem + ".weight", (rows, cols), "F8_E4M3")
            add(stem + ".weight_scale_inv", (rows, cols // 32), "U8")

    def biased(stem, rows, cols):
        add(stem + ".weight", (rows, cols))
        add(stem + ".bias", (rows,))

    text = "language_model.model."
    add(text + "embed_tokens.weight", (VOCAB, HIDDEN))
    add("language_model.lm_head.weight", (VOCAB, HIDDEN))
    add(text + "norm.weight", (HIDDEN,))
    for layer in range(LAYERS):
        at = f"{text}layers.{layer}."
        add(at + "input_layernorm.weight", (HIDDEN,))
        add(at + "post_attention_layernorm.weight", (HIDDEN,))
        matrix(at + "self_attn.q_proj", Q, HIDDEN)
        matrix(at + "self_attn.k_proj", KV, HIDDEN)
        matrix(at + "self_attn.v_proj", KV, HIDDEN)
        matrix(at + "self_attn.o_proj", HIDDEN, Q)
        add(at + "self_attn.q_norm.weight", (HEAD,))
        add(at + "self_attn.k_norm.weight", (HEAD,))
        if layer < DENSE_LAYERS:
            matrix(at + "mlp.gate_proj", DENSE, HIDDEN)
            matrix(at + "mlp.up_proj", DENSE, HIDDEN)
            matrix(at + "mlp.down_proj", HIDDEN, DENSE)
            continue
        matrix(at + "self_attn.index_q_proj", INDEX_Q, HIDDEN)
        matrix(at + "self_attn.index_k_proj", HEAD, HIDDEN)
        add(at + "self_attn.index_q_norm.weight", (HEAD,))
        add(at + "self_attn.index_k_norm.weight", (HEAD,))
        moe = at + "block_sparse_moe."
        add(moe + "gate.weight", (EXPERTS, HIDDEN), "F32")
        add(moe + "e_score_correction_bias", (EXPERTS,), "F32")
        for expert in range(EXPERTS):
            matrix(f"{moe}experts.{expert}.w1", EXPERT, HIDDEN, True)
            matrix(f"{moe}experts.{expert}.w3", EXPERT, HIDDEN, True)
            matrix(f"{moe}experts.{expert}.w2", HIDDEN, EXPERT, True)
        matrix(moe + "shared_experts.gate_proj", EXPERT, HIDDEN)
        matrix(moe + "shared_experts.up_proj", EXPERT, HIDDEN)
        matrix(moe + "shared_experts.down_proj", HIDDEN, EXPERT)
    tower = "vision_tower.vision_model."
    add(tower + "embeddings.patch_embedding.weight", (VISION, 3, 2, 14, 14), "F32")
    for leaf in ("weight", "bias"):
        add(tower + "pre_layrnorm." + leaf, (VISION,))
    for layer in range(VISION_LAYERS):
        at = f"{tower}encoder.layers.{layer}."
        for norm in ("layer_norm1", "layer_norm2"):
            for leaf in ("weight", "bias"):
                add(f"{at}{norm}.{leaf}", (VISION,))
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            biased(f"{at}self_attn.{part}", VISION, VISION)
        biased(at + "mlp.fc1", VISION_MLP, VISION)
        biased(at + "mlp.fc2", VISION, VISION_MLP)
    biased("multi_modal_projector.linear_1", HIDDEN, VISION)
    biased("multi_modal_projector.linear_2", HIDDEN, HIDDEN)
    biased("patch_merge_mlp.linear_1", HIDDEN, 4 * HIDDEN)
    biased("patch_merge_mlp.linear_2", HIDDEN, HIDDEN)
    return out


def tensor_bytes(dtype, shape):
    n = SIZE[dtype]
    for dim in shape:
        n *= dim
    return n


def write_shard(path, entries):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape in entries:
        end = at + tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=sorted(SHARDS), default="mxfp8")
    parser.add_argument("--out", required=True, help="folder to make; must not exist")
    args = parser.parse_args()
    os.mkdir(args.out)
    everything = tensors(args.format)
    total = sum(tensor_bytes(d, s) for _, d, s in everything)
    count, per_shard = SHARDS[args.format], -(-total // SHARDS[args.format])
    shards, done = [[] for _ in range(count)], 0
    for entry in everything:
        shards[min(done // per_shard, count - 1)].append(entry)
        done += tensor_bytes(entry[1], entry[2])
    weight_map = {}
    for n, entries in enumerate(shards):
        file_name = f"model-{n + 1:05d}-of-{count:05d}.safetensors"
        write_shard(os.path.join(args.out, file_name), entries)
        weight_map.update({name: file_name for name, _, _ in entries})
    # The BF16 release's index overstates the size by one dropped module; the NVFP4 export states none.
    metadata = {"bf16": {"total_size": total + 14984738304}, "mxfp8": {"total_size": total}, "nvfp4": {"format": "pt"}}
    with open(os.path.join(args.out, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": metadata[args.format], "weight_map": weight_map}, file)
    with open(os.path.join(args.out, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config(args.format), file, indent=2)
    with open(os.path.join(args.out, "generation_config.json"), "w", encoding="utf-8") as file:
        json.dump({"bos_token_id": 200019, "eos_token_id": 200020, "do_sample": True, "temperature": 1.0,
                   "top_p": 0.95}, file)
    print(f"{len(everything)} tensors, {total} bytes, {count} shards")
    return 0


if __name__ == "__main__":
    sys.exit(main())
