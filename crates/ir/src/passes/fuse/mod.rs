//! Neighbours become one launch: products with what surrounds them, elementwise regions, bundles.

pub mod bundles;
pub mod column_sums;
pub mod double_norms;
pub mod epilogues;
pub mod fused_products;
pub mod joined_products;
pub mod regions;
pub mod thin_products;
pub mod unit_axes;
