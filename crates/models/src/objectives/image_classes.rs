//! Classes of images: cross-entropy against a distribution, which includes mixing and smoothing of the labels.

use flatout_ir::ops::elementwise::Elementwise as E;
use flatout_ir::ops::reduce::Fold;
use flatout_ir::{Builder, DType, Tensor};

use crate::form::ImageForm;
use crate::images::Mix;

/// Results `loss` and `weight` for logits [B, C], weighted sums over images with the inputs `labels` and `label_weights`, and
/// `class_logits` unless the form has dropout.
///
/// With q the target's distribution over classes, an image's loss is lse - sum of q * logits.
pub fn loss<'g>(b: &'g Builder, logits: Tensor<'g>, mix: Option<Mix<'g>>, form: &ImageForm) {
    let dims = logits.dims();
    let (n, classes) = (dims[0], dims[1]);
    let labels = b.input("labels", DType::I32, &[n]);
    let weights = b.input("label_weights", DType::F32, &[n]);
    // In f32 whatever the precision of products, because class probabilities need it.
    let wide = logits.map(E::Cast(DType::F32));
    let class = b.iota(DType::F32, &dims, 1);
    let hot = |labels: Tensor<'g>| class.equal(labels.cast(DType::F32).reshape(&[n, 1]).broadcast(&dims));
    let mut target = hot(labels);
    if let Some(mix) = mix {
        // `gather` reads rows of a table.
        let other = labels.reshape(&[n, 1]).gather(mix.with).reshape(&[n]);
        let share = mix.share.reshape(&[n, 1]);
        target = target * share + hot(other) * share.scale(-1.0).offset(1.0);
    }
    if form.smoothing > 0.0 {
        let spread = form.smoothing;
        target = target.scale(1.0 - spread).offset(spread / classes as f64);
    }
    let shift = wide.reduce(1, Fold::Max);
    let lse = shift + (wide - shift).exp().sum(1).log();
    let loss = (lse - (target * wide).sum(1)).reshape(&[n]);
    b.result("loss", (weights * loss).sum(0));
    b.result("weight", weights.sum(0));
    if !form.dropout {
        b.result("class_logits", logits);
    }
}
