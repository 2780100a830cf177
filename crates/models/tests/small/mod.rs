//! A small decoder that the oracle runs quickly.

use flatout_models::config::DecoderConfig;

pub fn decoder() -> DecoderConfig {
    DecoderConfig {
        width: 12,
        layers: 2,
        heads: 2,
        kv_heads: Some(1),
        head_size: Some(6),
        ffn: 10,
        vocab: 13,
        context: 5,
        qk_norm: true,
        init_std: 0.3,
        ..DecoderConfig::default()
    }
}
