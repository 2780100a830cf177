//! Encoders among the architectures: alternative names of tensors, tensors that are not read, and the poolings of their heads
//! of classes.

use super::architecture::Architecture;
use super::{bert, distilbert, modernbert, roberta};
use crate::config::{DecoderConfig, Head, Pooling};

/// A row of the table of encoders, in addition to the architecture of the same name.
pub(crate) struct Encoder {
    pub architecture: &'static Architecture,
    /// The prefix of the body's tensors, which a file of the body alone omits.
    pub base: &'static str,
    /// Prefixes, after the base, of tensors that models without a head of classes do not read.
    pub unread: &'static [&'static str],
    /// Prefixes, after the base, of tensors that are never read, even beside a head of classes.
    pub never_read: &'static [&'static str],
    /// Prefixes of tensors of the head that a body's file may contain or lack.
    pub brought: &'static [&'static str],
    /// The poolings of the library's head of classes; the first applies where no field says it.
    pub poolings: &'static [Pooling],
}

const ALL: [&Encoder; 5] =
    [&modernbert::ENCODER, &bert::ENCODER, &roberta::ENCODER, &roberta::XLM_ENCODER, &distilbert::ENCODER];

impl Encoder {
    pub fn of(architecture: &Architecture) -> Option<&'static Encoder> {
        ALL.into_iter().find(|known| known.architecture.model_type == architecture.model_type)
    }

    /// Whether the library has the head of a model.
    pub fn check_head(&self, c: &DecoderConfig) -> Result<(), String> {
        let class = self.architecture.class_of_classes.unwrap_or_default();
        match c.head {
            Head::Tokens => Err(format!("it has no head of classes, and it is written as a {class}")),
            Head::Classes if self.poolings.contains(&c.pooling) => Ok(()),
            Head::Classes => {
                let known: Vec<String> = self.poolings.iter().map(ToString::to_string).collect();
                Err(format!(
                    "`model.pooling` is {}, and a {class} pools by {}",
                    c.pooling,
                    known.join(" or ")
                ))
            }
        }
    }
}

/// Other names of an encoder's weight: in files of the body alone, and in files that call a norm's vectors gamma and beta.
pub(crate) fn other_names(name: &str) -> Vec<String> {
    let of_base = |known: &&Encoder| name.strip_prefix(known.base)?.strip_prefix('.');
    let bare = ALL.iter().find_map(of_base);
    let older = |name: &str| {
        let (norm, vector) = name.rsplit_once("LayerNorm.")?;
        let older = if vector == "weight" { "gamma" } else { "beta" };
        Some(format!("{norm}LayerNorm.{older}"))
    };
    let all = [bare.map(str::to_string), older(name), bare.and_then(older)];
    all.into_iter().flatten().collect()
}

/// Whether a tensor is not read.
pub(crate) fn is_redundant(c: &DecoderConfig, name: &str) -> bool {
    let Some(known) = encoder(c) else { return false };
    let bare = name.strip_prefix(known.base).and_then(|rest| rest.strip_prefix('.')).unwrap_or(name);
    let is_of = |starts: &[&str]| starts.iter().any(|start| bare.starts_with(start));
    // Positions counted from 0, which old versions stored.
    bare == "embeddings.position_ids"
        || is_of(known.never_read)
        || (c.head == Head::Tokens && is_of(known.unread))
}

/// Whether a tensor may be absent: a part of the head in a file without a head of classes.
pub(crate) fn may_lack(c: &DecoderConfig, name: &str) -> bool {
    let is_brought = |known: &Encoder| known.brought.iter().any(|start| name.starts_with(start));
    c.head == Head::Tokens && encoder(c).is_some_and(is_brought)
}

fn encoder(c: &DecoderConfig) -> Option<&'static Encoder> {
    if c.encoder { Encoder::of(Architecture::of(c).ok()?) } else { None }
}
