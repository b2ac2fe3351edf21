"""Know which attention modules of vLLM and SGLang apply the rotary embedding that they have.

A module may have a rotary embedding and not apply it: the full layers of Cohere 2 and EXAONE 4 do
so. The condition is in the code of `forward`, and no attribute states it. So this table has it, by
the class of the module.

Invariant: a class that the table does not have is unknown. The adapters then require `key_content`
from the user. To permute keys that were not rotated would be a silent error.

How it works:
    A class is named by its file in the engine. `tests/support/forward_code.py` reads the code of
    each class in the installed engines. The tests compare its result with this table:
    `tests/session/test_vllm_installed.py` and `test_sglang_installed.py`.

    We tried to read the code of `forward` in the adapters. It took 170 lines to learn what few
    classes need, and its result depended on how an engine happens to write a condition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Classes that always apply the rotary embedding, if they have one, by the package of the engine.
ALWAYS: Mapping[str, frozenset[str]] = {
    "vllm.model_executor.layers": frozenset({"mla.MultiHeadLatentAttentionWrapper"}),
    "vllm.model_executor.models": _names(
        """
        apertus.ApertusAttention bailing_moe.BailingAttention chatglm.GLMAttention
        dbrx.DbrxAttention deepseek_v2.DeepseekAttention deepseek_v2.DeepseekV2Attention
        ernie45_moe.Ernie4_5_MoeAttention exaone.ExaoneAttention
        falcon_h1.FalconH1AttentionDecoderLayer gemma.GemmaAttention gemma2.Gemma2Attention
        gemma3.Gemma3Attention gemma3n.Gemma3nAttention gemma4.Gemma4Attention glm4.Glm4Attention
        glm4_moe.Glm4MoeAttention gpt_j.GPTJAttention gpt_oss.OAIAttention
        granitemoehybrid.GraniteMoeHybridAttention hyperclovax.HyperCLOVAXAttention
        internlm2.InternLM2Attention lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention
        llama.LlamaAttention llama4.Llama4Attention minicpm.MiniCPMAttention
        minicpm3.MiniCPM3Attention minimax_m2.MiniMaxM2Attention mistral.MistralAttention
        mixtral.MixtralAttention nemotron.NemotronAttention nemotron_nas.DeciLMAttention
        olmoe.OlmoeAttention openpangu.OpenPanguEmbeddedAttention openpangu.OpenPanguSinkAttention
        orion.OrionAttention phimoe.PhiMoEAttention qwen2.Qwen2Attention qwen2_moe.Qwen2MoeAttention
        qwen3.Qwen3Attention qwen3_moe.Qwen3MoeAttention qwen3_next.Qwen3NextAttention
        solar.SolarAttention stablelm.StablelmAttention step3_text.Step3TextAttention
        """
    ),
    "sglang.srt.models": _names(
        """
        apertus.ApertusAttention arcee.ArceeAttention bailing_moe.BailingMoEAttention
        chatglm.GLMAttention dbrx.DbrxAttention deepseek.DeepseekAttention exaone.ExaoneAttention
        gemma.GemmaAttention gemma2.Gemma2Attention gemma4_causal.Gemma4Attention glm4.Glm4Attention
        gpt_j.GPTJAttention gpt_oss.GptOssAttention granite.GraniteAttention
        granitemoe.GraniteMoeAttention grok.Grok1Attention hunyuan.HunYuanAttention
        internlm2.InternLM2Attention lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention
        llama.LlamaAttention llama4.Llama4Attention minicpm3.MiniCPM3AttentionMLA
        minimax_m2.MiniMaxM2Attention ministral3.Ministral3Attention mixtral.MixtralAttention
        olmo.OlmoAttention olmo2.Olmo2Attention olmoe.OlmoeAttention orion.OrionAttention
        persimmon.PersimmonAttention phi.PhiAttention phi3_small.Phi3SmallSelfAttention
        phimoe.PhiMoEAttention qwen.QWenAttention qwen2.Qwen2Attention qwen2_moe.Qwen2MoeAttention
        qwen3.Qwen3Attention solar.SolarAttention stablelm.StablelmAttention
        starcoder2.Starcoder2Attention step3p5.Step3p5Attention
        """
    ),
}

# Classes that apply it only in some layers, and the attributes that decide it.
CONDITIONS: Mapping[str, Callable[[Any], object]] = {
    "vllm.model_executor.models.afmoe.AfmoeAttention": lambda module: module.is_local_attention,
    "vllm.model_executor.models.cohere2_moe.Cohere2MoeAttention": lambda module: (
        module.sliding_window or module.force_rope
    ),
    "vllm.model_executor.models.commandr.CohereAttention": lambda module: (
        module.v1 or module.sliding_window
    ),
    "vllm.model_executor.models.exaone4.Exaone4Attention": lambda module: (
        module.sliding_window or module.apply_rope_all_layers
    ),
    "vllm.model_executor.models.exaone_moe.ExaoneMoeAttention": lambda module: module.use_rope,
    "vllm.model_executor.models.falcon.FalconAttention": lambda module: module.use_rotary,
    "vllm.model_executor.models.granite.GraniteAttention": lambda module: module.use_rope,
    "vllm.model_executor.models.granitemoe.GraniteMoeAttention": lambda module: module.use_rope,
    "vllm.model_executor.models.step3p5.Step3p5Attention": lambda module: module.use_rope,
    "sglang.srt.models.cohere2_moe.Cohere2MoeAttention": lambda module: (
        module.is_sliding or module.force_rope
    ),
    "sglang.srt.models.commandr.CohereAttention": lambda module: (
        module.v1 or module.sliding_window_size > 0
    ),
    "sglang.srt.models.exaone4.Exaone4Attention": lambda module: (
        not module.sliding_window_pattern or module.is_sliding
    ),
    "sglang.srt.models.exaone_moe.ExaoneMoEAttention": lambda module: (
        module.sliding_window or module.apply_rope_all_layers
    ),
}


def applies_rotary(module: object) -> bool | None:
    """Return whether *module* applies its rotary embedding, or None if it is unknown.

    A module that has none, where its class needs one, may get one from its caller: it is unknown.
    """
    # A `forward` that was set on the object has other code than its class.
    if "forward" in vars(module):
        return None
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    *package, file, kind = name.split(".")
    try:
        always = f"{file}.{kind}" in ALWAYS.get(".".join(package), ())
        applied = always or bool(CONDITIONS[name](module))
    except (KeyError, AttributeError, TypeError):
        return None
    # Falcon with ALiBi has no rotary embedding, and its condition is false.
    missing = getattr(module, "rotary_emb", None) is None
    return None if applied and missing else applied
