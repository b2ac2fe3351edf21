"""Each field of vLLM's configuration, and where the names of stored pages contain it.

A field that a newer vLLM adds is in no list. Then the test of the installed vLLM fails, and
somebody has to decide whether the field changes the values or the bytes of a cache.

How it works:
    `FIELDS` has a list for each place, by the class of the field:

        identity    `model_identity` states it: it changes values
        placement   the placement has it: it changes the bytes of a page, or what they mean
        request     the request has it: it changes tokens, media or adapters
        refused     an engine with a store does not start with it
        nowhere     it decides no value: sizes of memory, sampling, or how results are rounded
"""

from __future__ import annotations

FIELDS: dict[str, dict[str, str]] = {
    "ModelConfig": {
        "identity": """
            model revision code_revision quantization quantization_config hf_config hf_config_path
            hf_overrides model_class_overrides multimodal_config dtype""",
        # With a window that is disabled, or with LongRoPE, keys have another spec or rotation.
        "placement": "hf_text_config disable_sliding_window max_model_len",
        "request": """
            tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enable_prompt_embeds
            io_processor_plugin""",
        "refused": "enable_sleep_mode",
        # The files of one revision are one model, whichever of them and by whichever code vLLM
        # reads them. `seed` makes random weights, which the user has to name.
        "nowhere": """
            model_weights trust_remote_code config_format model_impl seed runner convert
            pooler_config is_submodel_config word_embeddings_untied_by_checkpoint
            allow_deprecated_quantization enforce_eager disable_cascade_attn
            allowed_local_media_path allowed_media_domains spec_target_max_model_len
            return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay
            served_model_name hf_token generation_config override_generation_config
            sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
            enable_nccl_comm_suspend enable_cumem_allocator logits_processors
            renderer_num_workers""",
    },
    "CacheConfig": {
        "identity": "cache_dtype mamba_cache_dtype is_attention_free",
        "placement": """
            mamba_ssm_cache_dtype kv_cache_dtype_skip_layers sliding_window kv_cache_layout
            block_size mamba_block_size mamba_page_size_padded skip_page_size_padded""",
        # ReplaySSM writes the whole state at the end of each block. The windows that a bounded
        # replay leaves out are those of a model with rings, which cannot be stored. Layers that
        # share a cache do not write it.
        "nowhere": """
            user_specified_block_size prefix_match_unit gpu_memory_utilization
            num_gpu_blocks_override enable_prefix_caching prefix_caching_hash_algo
            prefix_cache_retention_interval mamba_cache_mode enable_mamba_shared_prefix_checkpoint
            replayssm_buffer_len use_replayssm use_kda_recoverssm num_gpu_blocks num_cpu_blocks
            effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency
            hash_block_size cache_hit_alignment_tokens kv_sharing_fast_prefill swa_bounded_replay
            kv_cache_memory_bytes kv_offloading_size kv_offloading_backend _block_size_resolved
            simple_cpu_offload_num_blocks""",
    },
    "ParallelConfig": {
        "placement": """
            decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
            _allow_auto_resolve_cp_interleave_size""",
        # A page has all heads and layers, so no name depends on who has computed which.
        "nowhere": """
            pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size
            data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
            data_parallel_master_ip data_parallel_rpc_port dp_sync_interval
            data_parallel_master_port data_parallel_backend data_parallel_external_lb
            data_parallel_hybrid_lb is_moe_model enable_hc_sp enable_expert_parallel
            enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb eplb_config
            expert_placement_strategy all2all_backend max_parallel_loading_workers
            disable_custom_all_reduce enable_shm_tensor_arena enable_elastic_ep
            elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold
            dbo_prefill_token_threshold disable_nccl_for_dp_synchronization ray_workers_use_nsight
            ray_runtime_env placement_group distributed_executor_backend worker_cls
            worker_extension_cls master_addr master_port node_rank nnodes numa_bind numa_bind_nodes
            numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds
            cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list
            _coord_store_port dcp_comm_backend dcp_q_replicate data_parallel_index
            _api_process_count _api_process_rank enable_fault_tolerance fault_tolerance_config""",
    },
    "QuantizationConfigArgs": {"identity": "linear moe ignore targets"},
    "QuantSpec": {"identity": "weight activation"},
    "LoRAConfig": {
        # `kvspec.adapters.vllm.adapters` states these with each adapter.
        "request": """
            target_modules enable_tower_connector_lora enable_mixed_moe_lora_format
            enable_moe_shared_loras lora_dtype default_mm_loras""",
        "nowhere": """
            max_lora_rank max_loras max_cpu_loras fully_sharded_loras specialize_active_lora
            max_lora_cls_labels""",
    },
    "SpeculativeConfig": {
        # The configuration of the draft has its model, revision and quantization.
        "identity": """
            method model revision code_revision quantization draft_model_config
            draft_load_config""",
        "placement": "kv_cache_dtype",
        # A draft proposes tokens. How many, and which are accepted, changes none of its keys
        # behind the tokens that are known.
        "nowhere": """
            enforce_eager num_speculative_tokens draft_tensor_parallel_size tensor_parallel_size
            moe_backend attention_backend max_model_len index_share_for_mtp_iteration
            disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction
            use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting
            target_model_config target_parallel_config num_speculative_tokens_per_batch_size
            draft_parallel_config suffix_decoding_max_tree_depth
            suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
            suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates
            synthetic_acceptance_length enable_adaptive_verification draft_sample_method
            dspark_draft_topk disable_lookahead_block_hashes draft_lm_head_quantization
            fly_entropy_threshold fly_entropy_top_k fly_window_size xpress_topc""",
    },
    "LoadConfig": {
        # Formats that read other files than those of the model need a version of the weights.
        "identity": "load_format",
        "nowhere": """
            download_dir safetensors_load_strategy safetensors_prefetch_num_threads
            safetensors_prefetch_block_size model_loader_extra_config device ignore_patterns
            use_tqdm_on_load pt_load_map_location""",
    },
    "MultiModalConfig": {
        "identity": """
            mm_processor_kwargs mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate
            video_pruning_method""",
        # vLLM's identifier of an item is a hash of what was read with these.
        "request": """
            language_model_only limit_per_prompt enable_mm_embeds media_io_kwargs
            mm_hasher_algorithm interleave_mm_strings allow_missing_mm_embeddings""",
        "nowhere": """
            mm_device_do_normalize mm_processor_cache_gb mm_processor_cache_type
            mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
            mm_encoder_attn_backend mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
            skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb""",
    },
    "AttentionConfig": {
        "identity": """
            use_non_causal use_prefill_query_quantization disable_flashinfer_q_quantization""",
        "placement": "indexer_kv_dtype",
        "nowhere": """
            backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
            tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend
            indexer_sparse_logits hisparse_config sparse_mla_force_mqa
            sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n
            flex_attn_q_block_size flex_attn_kv_block_size indexer_tp_shard_min_rows
            minimax_m3_indexer_cp trtllm_ragged_backend""",
    },
    "KernelConfig": {
        "nowhere": """
            ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
            enable_cutedsl_warmup enable_jit_warmup moe_backend sparse_indexer_topk_backend
            linear_backend linear_backend_per_quant monokernel""",
    },
    "MambaConfig": {
        "nowhere": """
            backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm""",
    },
    "VllmConfig": {
        "identity": """
            model_config cache_config load_config attention_config speculative_config
            quant_config""",
        "placement": "parallel_config",
        "request": "lora_config",
        "refused": "diffusion_config weight_transfer_config",
        "nowhere": """
            scheduler_config device_config offload_config aux_output_config engram_config
            mamba_config kernel_config watermark_config structured_outputs_config
            observability_config logging_config compilation_config profiler_config
            kv_transfer_config kv_events_config ec_transfer_config ec_manager_config
            reasoning_config additional_config instance_id optimization_level performance_mode
            shutdown_timeout watchdog_config""",
    },
}

NEWER = {
    "CacheConfig": "simple_cpu_offload_num_blocks",
    "SpeculativeConfig": """
        disable_lookahead_block_hashes draft_lm_head_quantization fly_entropy_threshold
        fly_entropy_top_k fly_window_size xpress_topc""",
    "AttentionConfig": "indexer_tp_shard_min_rows minimax_m3_indexer_cp trtllm_ragged_backend",
    "KernelConfig": "monokernel",
    "VllmConfig": "watchdog_config",
}
"""Fields that vLLM 0.33 has, and 0.32 has not, by class."""
