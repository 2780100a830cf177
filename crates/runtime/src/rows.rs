//! Default kernel row for both backends, and the lists of element types that rows name.

use flatout_ir::OpKind;
use flatout_ir::target::{KernelRow, Layout, no_workspace};
use flatout_ir::types::DType;

pub(crate) const FLOATS: &[DType] = &[DType::F32, DType::BF16];
pub(crate) const ANY_TYPE: &[DType] = &[DType::F32, DType::BF16, DType::I32];
/// For kernels that only move or cast elements.
pub(crate) const EVERY_TYPE: &[DType] =
    &[DType::F32, DType::BF16, DType::E4M3, DType::E5M2, DType::I32, DType::U8];

/// A deterministic kernel without workspace; each kernel's file overrides the fields that differ.
pub(crate) const fn kernel_row(
    name: &'static str,
    op: OpKind,
    dtypes: &'static [DType],
    layout: Layout,
) -> KernelRow {
    KernelRow { name, op, dtypes, ins: layout, outs: layout, workspace: no_workspace, deterministic: true }
}
