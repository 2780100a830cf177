//! Strided tensors over the arena, as kernels read and write them.
//!
//! A `Tensor` is a pointer with dimensions; `Rows` is the same with all axes but the last folded into one. Access is `unsafe`
//! because it bypasses borrowing: an output may coincide with an input (see `Op::in_place`), and tasks write different parts of
//! one output. All accessors have the same contract, which kernels guarantee:
//!
//! * the launch was checked by `launch::check`, so every index inside `dims` is inside the arena and aligned, and outputs
//!   overlap nothing but the inputs they are in place of;
//! * while a task writes an element, no other task reads or writes it;
//! * no slice of an input is alive while an output that overlaps it is written.

use std::marker::PhantomData;

use flatout_ir::View;
use flatout_ir::block8::{e4m4_from_f32, e4m4_to_f32};
use flatout_ir::fp8::{e4m3_from_f32, e4m3_to_f32, e5m2_from_f32, e5m2_to_f32};
use flatout_ir::types::{DType, bf16_from_f32, bf16_to_f32};

use super::math::vectorised;

#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    start: *mut u8,
    pub dtype: DType,
    pub dims: &'a [usize],
    /// In elements; 0 broadcasts.
    pub strides: &'a [usize],
    arena: PhantomData<&'a u8>,
}

// SAFETY: a tensor is an address and numbers; the accessors' contract covers use from several threads.
unsafe impl Send for Tensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for Tensor<'_> {}

impl<'a> Tensor<'a> {
    /// # Safety
    /// `arena` points to memory that holds the view and lives for `'a`.
    pub unsafe fn new(arena: *mut u8, view: &'a View) -> Self {
        // SAFETY: the view lies inside the arena.
        let start = unsafe { arena.add(view.offset) };
        Tensor { start, dtype: view.dtype, dims: &view.dims, strides: &view.strides, arena: PhantomData }
    }

    pub fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    pub fn is_dense(&self) -> bool {
        let mut expected = 1;
        for (&dim, &stride) in self.dims.iter().zip(self.strides).rev() {
            if dim != 1 && stride != expected {
                return false;
            }
            expected *= dim;
        }
        true
    }

    /// The address of the element `offset` elements (by strides, not by index) after the first.
    pub fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset * self.dtype.bytes())
    }

    /// All elements of a dense f32 tensor; `None` for others.
    ///
    /// # Safety
    /// The module's contract.
    pub unsafe fn f32s(&self) -> Option<&'a [f32]> {
        (self.dtype == DType::F32 && self.is_dense())
            // SAFETY: dense elements from the start; the caller guarantees the module's contract.
            .then(|| unsafe { std::slice::from_raw_parts(self.start.cast(), self.elements()) })
    }

    /// As `f32s`, mutable.
    ///
    /// # Safety
    /// The module's contract.
    #[allow(clippy::mut_from_ref, reason = "the contract stands in for the borrow")]
    pub unsafe fn f32s_mut(&self) -> Option<&'a mut [f32]> {
        (self.dtype == DType::F32 && self.is_dense())
            // SAFETY: as in `f32s`.
            .then(|| unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.elements()) })
    }

    /// The bytes of a dense tensor.
    ///
    /// # Safety
    /// The module's contract.
    pub unsafe fn bytes(&self) -> &'a [u8] {
        assert!(self.is_dense(), "the kernel asks for dense tensors");
        // SAFETY: dense elements from the start; the caller guarantees the module's contract.
        unsafe { std::slice::from_raw_parts(self.start, self.elements() * self.dtype.bytes()) }
    }

    /// As `bytes`, mutable.
    ///
    /// # Safety
    /// The module's contract.
    #[allow(clippy::mut_from_ref, reason = "the contract stands in for the borrow")]
    pub unsafe fn bytes_mut(&self) -> &'a mut [u8] {
        assert!(self.is_dense(), "the kernel asks for dense tensors");
        // SAFETY: as in `bytes`.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.elements() * self.dtype.bytes()) }
    }

    /// All elements of an i32 tensor, in row-major order.
    ///
    /// # Safety
    /// The module's contract; the tensor holds i32.
    pub unsafe fn i32s(&self) -> Vec<i32> {
        debug_assert_eq!(self.dtype, DType::I32);
        let rows = self.rows();
        let mut out = Vec::with_capacity(self.elements());
        for r in 0..rows.count {
            let at = self.at(rows.offset(r)).cast::<i32>();
            // SAFETY: columns inside the row.
            out.extend((0..rows.width).map(|c| unsafe { *at.add(c * rows.stride) }));
        }
        out
    }

    /// The element of a tensor with exactly one, as f32.
    ///
    /// # Safety
    /// The module's contract.
    pub unsafe fn scalar(&self) -> f32 {
        let mut value = [0.0];
        // SAFETY: the first element; the caller guarantees the contract.
        unsafe { load(self.dtype, self.start, 1, &mut value) };
        value[0]
    }

    /// The tensor as rows of its last axis. A tensor without axes is one row of one element.
    pub fn rows(&self) -> Rows<'a> {
        let Some((&width, outer)) = self.dims.split_last() else {
            return Rows { tensor: *self, count: 1, width: 1, stride: 1, pitch: Some(0) };
        };
        let count = outer.iter().product();
        let stride = if width == 1 { 1 } else { self.strides[outer.len()] };
        Rows { tensor: *self, count, width, stride, pitch: pitch(outer, self.strides) }
    }
}

/// The common stride if the axes fold into one; `None` otherwise.
fn pitch(dims: &[usize], strides: &[usize]) -> Option<usize> {
    let mut axes = dims.iter().zip(strides).rev().filter(|(d, _)| **d != 1);
    let Some((mut extent, pitch)) = axes.next().map(|(d, s)| (*d, *s)) else { return Some(0) };
    for (dim, stride) in axes {
        if *stride != extent * pitch {
            return None;
        }
        extent *= dim;
    }
    Some(pitch)
}

/// A tensor as `count` rows of `width` elements.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub tensor: Tensor<'a>,
    pub count: usize,
    pub width: usize,
    /// Stride between the elements of a row.
    pub stride: usize,
    /// Stride between rows, if it is constant.
    pub pitch: Option<usize>,
}

impl<'a> Rows<'a> {
    /// Offset of a row from the tensor's first element, in elements.
    #[inline]
    pub fn offset(&self, row: usize) -> usize {
        if let Some(pitch) = self.pitch {
            return row * pitch;
        }
        let outer = self.tensor.dims.len() - 1;
        let (mut rest, mut offset) = (row, 0);
        for axis in (0..outer).rev() {
            offset += rest % self.tensor.dims[axis] * self.tensor.strides[axis];
            rest /= self.tensor.dims[axis];
        }
        offset
    }

    /// Whether rows can be borrowed as f32 slices.
    pub fn is_f32(&self) -> bool {
        self.tensor.dtype == DType::F32 && self.stride == 1
    }

    /// Reads `to.len()` elements of a row from column `from`, as f32.
    ///
    /// # Safety
    /// The module's contract; the columns lie in the row.
    #[inline]
    pub unsafe fn load(&self, row: usize, from: usize, to: &mut [f32]) {
        debug_assert!(row < self.count && from + to.len() <= self.width);
        let at = self.tensor.at(self.offset(row) + from * self.stride);
        // SAFETY: the elements lie in the row.
        unsafe { load(self.tensor.dtype, at, self.stride, to) }
    }

    /// Writes elements of a row from column `from`, rounded to the tensor's type.
    ///
    /// # Safety
    /// The module's contract; the columns lie in the row.
    #[inline]
    pub unsafe fn store(&self, row: usize, from: usize, values: &[f32]) {
        debug_assert!(row < self.count && from + values.len() <= self.width);
        let at = self.tensor.at(self.offset(row) + from * self.stride);
        // SAFETY: the elements lie in the row.
        unsafe { store(self.tensor.dtype, at, self.stride, values) }
    }

    /// A row as f32: in place if it is contiguous f32, otherwise converted into `buffer`. Use `load` instead for an input that
    /// the task overwrites in place while it holds the row.
    ///
    /// # Safety
    /// The module's contract.
    #[inline]
    pub unsafe fn get<'b>(&self, row: usize, buffer: &'b mut [f32]) -> &'b [f32]
    where
        'a: 'b,
    {
        // SAFETY: the row lies in the tensor; the caller guarantees the contract.
        unsafe {
            if self.is_f32() {
                let at = self.tensor.at(self.offset(row)).cast::<f32>();
                return std::slice::from_raw_parts(at, self.width);
            }
            self.load(row, 0, &mut buffer[..self.width]);
        }
        &buffer[..self.width]
    }

    /// Lets `write` fill a row: in place if it is contiguous f32, otherwise `buffer`, which is then stored. The slice that
    /// `write` receives does not contain the row's value.
    ///
    /// # Safety
    /// The module's contract; no slice of memory that overlaps the row is alive.
    #[inline]
    pub unsafe fn put(&self, row: usize, buffer: &mut [f32], write: impl FnOnce(&mut [f32])) {
        // SAFETY: the row lies in the tensor; the caller guarantees the contract.
        unsafe {
            if self.is_f32() {
                let at = self.tensor.at(self.offset(row)).cast::<f32>();
                return write(std::slice::from_raw_parts_mut(at, self.width));
            }
            write(&mut buffer[..self.width]);
            self.store(row, 0, &buffer[..self.width]);
        }
    }
}

vectorised! {
    fn widen(from: &[u16], to: &mut [f32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16_to_f32(*from));
    }
    fn narrow(from: &[f32], to: &mut [u16]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = round_bf16(*from));
    }
}

/// Branch-free `bf16_from_f32`.
#[inline(always)]
pub fn round_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let nan = (bits >> 16) as u16 | 0x40;
    if x.is_nan() { nan } else { rounded }
}

/// Reads elements of any type as f32.
///
/// # Safety
/// `to.len()` elements at `at`, `stride` apart, may be read.
#[inline]
pub unsafe fn load(dtype: DType, at: *const u8, stride: usize, to: &mut [f32]) {
    let n = to.len();
    // SAFETY: guaranteed by the caller.
    unsafe {
        match dtype {
            DType::F32 if stride == 1 => std::ptr::copy_nonoverlapping(at.cast(), to.as_mut_ptr(), n),
            DType::F32 => (0..n).for_each(|i| to[i] = *at.cast::<f32>().add(i * stride)),
            DType::BF16 if stride == 1 => widen(std::slice::from_raw_parts(at.cast(), n), to),
            DType::BF16 => (0..n).for_each(|i| to[i] = bf16_to_f32(*at.cast::<u16>().add(i * stride))),
            DType::I32 => (0..n).for_each(|i| to[i] = *at.cast::<i32>().add(i * stride) as f32),
            DType::U8 => (0..n).for_each(|i| to[i] = *at.add(i * stride) as f32),
            DType::E4M3 => (0..n).for_each(|i| to[i] = e4m3_to_f32(*at.add(i * stride))),
            DType::E5M2 => (0..n).for_each(|i| to[i] = e5m2_to_f32(*at.add(i * stride))),
            DType::E4M4 => (0..n).for_each(|i| to[i] = e4m4_to_f32(*at.add(i * stride))),
            DType::F64 => unreachable!("the CPU's target does not offer f64"),
        }
    }
}

/// Writes f32 values as any type.
///
/// # Safety
/// `values.len()` elements at `at`, `stride` apart, may be written.
#[inline]
pub unsafe fn store(dtype: DType, at: *mut u8, stride: usize, values: &[f32]) {
    let n = values.len();
    // SAFETY: guaranteed by the caller.
    unsafe {
        match dtype {
            DType::F32 if stride == 1 => std::ptr::copy_nonoverlapping(values.as_ptr(), at.cast(), n),
            DType::F32 => (0..n).for_each(|i| *at.cast::<f32>().add(i * stride) = values[i]),
            DType::BF16 if stride == 1 => narrow(values, std::slice::from_raw_parts_mut(at.cast(), n)),
            DType::BF16 => (0..n).for_each(|i| *at.cast::<u16>().add(i * stride) = bf16_from_f32(values[i])),
            DType::I32 => (0..n).for_each(|i| *at.cast::<i32>().add(i * stride) = values[i] as i32),
            DType::U8 => (0..n).for_each(|i| *at.add(i * stride) = values[i] as u8),
            DType::E4M3 => (0..n).for_each(|i| *at.add(i * stride) = e4m3_from_f32(values[i])),
            DType::E5M2 => (0..n).for_each(|i| *at.add(i * stride) = e5m2_from_f32(values[i])),
            DType::E4M4 => (0..n).for_each(|i| *at.add(i * stride) = e4m4_from_f32(values[i])),
            DType::F64 => unreachable!("the CPU's target does not offer f64"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(dims: &[usize], strides: &[usize]) -> View {
        View { offset: 0, dtype: DType::F32, dims: dims.into(), strides: strides.into() }
    }

    #[test]
    fn rows_of_strided_tensors_start_where_indices_say() {
        let mut memory: Vec<f32> = (0..200).map(|i| i as f32).collect();
        for (dims, strides) in [
            (vec![4, 3, 5], vec![40, 10, 2]),
            (vec![3, 4, 5], vec![5, 15, 1]),
            (vec![7], vec![3]),
            (vec![], vec![]),
        ] {
            let view = view(&dims, &strides);
            // SAFETY: every case fits 200 floats.
            let tensor = unsafe { Tensor::new(memory.as_mut_ptr().cast(), &view) };
            let rows = tensor.rows();
            let mut got = vec![0.0; rows.width];
            for r in 0..rows.count {
                // SAFETY: nothing writes.
                unsafe { rows.load(r, 0, &mut got) };
                let (mut rest, mut offset) = (r, 0);
                for axis in (0..dims.len().saturating_sub(1)).rev() {
                    offset += rest % dims[axis] * strides[axis];
                    rest /= dims[axis];
                }
                let step = strides.last().copied().unwrap_or(1);
                let want: Vec<f32> = (0..rows.width).map(|c| (offset + c * step) as f32).collect();
                assert_eq!(got, want, "row {r} of {dims:?} by {strides:?}");
            }
        }
    }

    #[test]
    fn branch_free_rounding_is_the_types_rounding() {
        let mut bits = 1_u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            assert_eq!(round_bf16(x), bf16_from_f32(x), "{x:e}");
        }
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::MAX] {
            assert_eq!(round_bf16(x), bf16_from_f32(x), "{x:e}");
        }
    }
}
