"""Models of libraries as people use them, tiny and with random parameters; nothing is downloaded.

The libraries live in an environment of their own (``make zoo-env``). A model of a library that is not installed is left
out, and the bench says which.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tools.bench.zoo.library_builders import (
    DECODERS,
    adapted,
    autoencoder,
    conditioned_unet,
    decoder,
    dit,
    litgpt,
    llama,
    mixer,
    sentences,
    tabular,
    unet,
    unet1d,
    vq_autoencoder,
)
from tools.bench.zoo.library_graphs import chemprop, graph_net, node_classes
from tools.bench.zoo.library_parts import Built, Squares, elsewhere, floats, language, net, of

__all__ = ["ARCHITECTURES", "LIBRARIES"]

_VIT = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48}

_MONAI = "monai.networks.nets."
_TIGHT = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}

ARCHITECTURES: dict[str, Callable[[], Built]] = {
    **{f"x_transformers.{name}": language(lambda o=o: decoder(**o)) for name, o in DECODERS.items()},
    "x_transformers.vit": lambda: (
        Squares(of("x_transformers.ViTransformerWrapper", image_size=16, patch_size=4, num_classes=5,
                    attn_layers=of("x_transformers.Encoder", dim=32, depth=2, heads=4))), floats((3, 16, 16))),
    "vit_pytorch.vit": net("vit_pytorch.vit.ViT", (3, 16, 16), **_VIT),
    "vit_pytorch.simple": net("vit_pytorch.simple_vit.SimpleViT", (3, 16, 16), **_VIT),
    "vit_pytorch.deepvit": net("vit_pytorch.deepvit.DeepViT", (3, 16, 16), **_VIT),
    "vit_pytorch.registers": net("vit_pytorch.simple_vit_with_register_tokens.SimpleViT", (3, 16, 16), **_VIT),
    "vit_pytorch.parallel": net("vit_pytorch.parallel_vit.ViT", (3, 16, 16), **_VIT, num_parallel_branches=2),
    "vit_pytorch.small_data": net("vit_pytorch.vit_for_small_dataset.ViT", (3, 16, 16), **_VIT),
    "einops.mixer": mixer,
    "transformers.gpt2": elsewhere("language", "gpt2"),
    "transformers.llama": elsewhere("language", "llama"),
    "transformers.bert": elsewhere("language", "bert"),
    "timm.resnet18": elsewhere("images", "resnet18"),
    "timm.convnext": elsewhere("images", "convnext_atto"),
    "sentence_transformers.mean": sentences("mean"),
    "sentence_transformers.max": sentences("max"),
    "diffusers.unet": unet,
    "diffusers.unet_condition": conditioned_unet,
    "diffusers.autoencoder": autoencoder,
    "diffusers.vq": vq_autoencoder,
    "diffusers.dit": dit,
    "diffusers.unet1d": unet1d,
    "peft.lora": adapted("LoraConfig", r=4),
    "peft.dora": adapted("LoraConfig", r=4, use_dora=True),
    "peft.ia3": adapted("IA3Config", target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"]),
    "peft.prompt": adapted("PromptTuningConfig", num_virtual_tokens=4),
    "peft.loha": adapted("LoHaConfig", llama, r=4, target_modules=["q_proj"]),
    "monai.unet": net(_MONAI + "UNet", (1, 16, 16), **_TIGHT, channels=(8, 16, 32), strides=(2, 2)),
    "monai.unet_residual": net(_MONAI + "UNet", (1, 16, 16), **_TIGHT, channels=(8, 16, 32), strides=(2, 2), num_res_units=2),
    "monai.attention_unet": net(_MONAI + "AttentionUnet", (1, 16, 16), **_TIGHT, channels=(8, 16, 32), strides=(2, 2)),
    "monai.segresnet": net(_MONAI + "SegResNet", (1, 16, 16), **_TIGHT, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
    "monai.dynunet": net(_MONAI + "DynUNet", (1, 16, 16), **_TIGHT, kernel_size=[3, 3, 3], strides=[1, 2, 2],
                          upsample_kernel_size=[2, 2], filters=[8, 16, 32]),
    "monai.basic_unet": net(_MONAI + "BasicUNet", (1, 32, 32), **_TIGHT, features=(8, 8, 16, 16, 32, 8)),
    "monai.unet_plus_plus": net(_MONAI + "BasicUNetPlusPlus", (1, 32, 32), **_TIGHT, features=(8, 8, 16, 16, 32, 8)),
    "monai.unetr": net(_MONAI + "UNETR", (1, 32, 32), **_TIGHT, img_size=(32, 32), feature_size=8, hidden_size=48,
                        mlp_dim=64, num_heads=4),
    "monai.vit": net(_MONAI + "ViT", (1, 16, 16), in_channels=1, img_size=(16, 16), patch_size=(4, 4), hidden_size=32,
                      mlp_dim=48, num_layers=2, num_heads=4, spatial_dims=2),
    "monai.highresnet": net(_MONAI + "HighResNet", (1, 16, 16), **_TIGHT),
    "monai.efficientnet": net(_MONAI + "EfficientNetBN", (3, 32, 32), model_name="efficientnet-b0", spatial_dims=2,
                               in_channels=3, num_classes=3, pretrained=False),
    "monai.densenet": net(_MONAI + "DenseNet", (1, 32, 32), **_TIGHT, init_features=8, growth_rate=4, block_config=(2, 2)),
    "monai.varautoencoder": net(_MONAI + "AutoEncoder", (1, 16, 16), **_TIGHT, channels=(8, 16), strides=(2, 2)),
    "monai.resnet": net(_MONAI + "resnet18", (1, 32, 32), spatial_dims=2, n_input_channels=1, num_classes=3),
    "monai.vnet": net(_MONAI + "VNet", (1, 32, 32), spatial_dims=2, in_channels=1, out_channels=2),
    "pyg.gcn": graph_net("GCN"),
    "pyg.sage": graph_net("GraphSAGE"),
    "pyg.gin": graph_net("GIN"),
    "pyg.gat": graph_net("GAT", heads=2),
    "pyg.gcn_norm": graph_net("GCN", pass_batch=True, norm="layer_norm", jk="cat"),
    "pyg.gcn_graph_norm": graph_net("GCN", pass_batch=True, norm="graph_norm"),
    "pyg.node_classes": node_classes,
    "chemprop.bonds_mean": chemprop("BondMessagePassing", "MeanAggregation"),
    "chemprop.atoms_norm": chemprop("AtomMessagePassing", "NormAggregation"),
    "litgpt.pythia": language(lambda: litgpt()),
    "litgpt.llama": language(lambda: litgpt(norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
                        intermediate_size=48, bias=False)),
    "litgpt.grouped": language(lambda: litgpt(n_query_groups=2, parallel_residual=False)),
    "litgpt.experts": language(lambda: litgpt(mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2,
                        intermediate_size=48)),
    "rtdl.mlp": net("rtdl_revisiting_models.MLP", (6,), d_in=6, d_out=2, n_blocks=2, d_block=16, dropout=0.1),
    "rtdl.resnet": net("rtdl_revisiting_models.ResNet", (6,), d_in=6, d_out=2, n_blocks=2, d_block=16, d_hidden=None,
                        d_hidden_multiplier=2.0, dropout1=0.1, dropout2=0.0),
    "rtdl.transformer": tabular,
    "rtdl_num_embeddings.linear_relu": net("rtdl_num_embeddings.LinearReLUEmbeddings", (6,), n_features=6, d_embedding=8),
    "rtdl_num_embeddings.periodic": net("rtdl_num_embeddings.PeriodicEmbeddings", (6,), n_features=6, d_embedding=8,
                        lite=False),
    "conformer.conformer": net("conformer.Conformer", (20, 32), dim=32, depth=2, dim_head=8, heads=4, ff_mult=2,
                                conv_expansion_factor=2, conv_kernel_size=5),
    "linformer.lm": language(lambda: of("linformer.LinformerLM", num_tokens=64, dim=32, seq_len=16, depth=2, heads=4, k=8)),
    "performer.lm": language(lambda: of("performer_pytorch.PerformerLM", num_tokens=64, max_seq_len=16, dim=32,
                        depth=2, heads=4, causal=False)),
    "local_attention.transformer": language(lambda: of("local_attention.LocalTransformer", num_tokens=64, dim=32,
                        depth=2, max_seq_len=32, local_attn_window_size=8, causal=True)),
    "nystrom.former": net("nystrom_attention.Nystromformer", (16, 32), dim=32, dim_head=8, heads=4, depth=2, num_landmarks=4),
    "perceiver.perceiver": net("perceiver_pytorch.Perceiver", (16, 16, 3), input_channels=3, input_axis=2, num_freq_bands=4,
                                max_freq=10.0, depth=2, num_latents=8, latent_dim=32, cross_heads=1, latent_heads=4,
                                cross_dim_head=8, latent_dim_head=8, num_classes=5),
    "vector_quantize.fsq": net("vector_quantize_pytorch.FSQ", (8, 16), levels=[5, 5, 5], dim=16),
    "soft_moe.layer": net("soft_moe_pytorch.SoftMoE", (8, 32), dim=32, seq_len=8, num_experts=4,
                          is_distributed=False),
    "tabnet.tabnet": net("pytorch_tabnet.tab_network.TabNet", (6,), input_dim=6, output_dim=2, n_d=8, n_a=8,
                          group_attention_matrix=torch.eye(6)),
    "snac.codec": net("snac.SNAC", (1, 512), sampling_rate=16000, encoder_dim=8, encoder_rates=[2, 4], decoder_dim=32,
                       decoder_rates=[4, 2], attn_window_size=None, codebook_size=16, codebook_dim=4, vq_strides=[2, 1],
                      noise=False),  # micro-batches draw other noise than the whole batch
    "e3nn.linear": net("e3nn.o3.Linear", (16,), irreps_in="4x0e+4x1o", irreps_out="2x0e+2x1o"),
    "egnn.layer": lambda: (Squares(of("egnn_pytorch.EGNN", dim=8)), floats((6, 8), (6, 3))),
    "egnn.network": lambda: (
        Squares(of("egnn_pytorch.EGNN_Network", num_tokens=10, dim=8, depth=2, num_nearest_neighbors=3)),
        lambda n: (torch.randint(0, 10, (n, 6)), torch.randn(n, 6, 3))),
    "lightly.simclr_head": net("lightly.models.modules.SimCLRProjectionHead", (16,), input_dim=16, hidden_dim=16,
                        output_dim=8),
    "lightly.byol_head": net("lightly.models.modules.BYOLPredictionHead", (16,), input_dim=16, hidden_dim=16, output_dim=8),
}  # fmt: skip

LIBRARIES = sorted({name.partition(".")[0] for name in ARCHITECTURES})
