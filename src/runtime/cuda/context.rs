//! CUDA context of one device: its stream, the loaded kernels, its memory, and recorded graphs of launches.
//!
//! All work of a context goes through one stream, in order. Memory is freed when its last user is dropped; the
//! driver then waits for work that still uses it.
#![allow(unsafe_code)]

use super::driver::error;
use crate::error::{Error, Result};
use crate::runtime::device::DeviceInfo;
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr, CUevent_flags_enum, CUfunction_attribute_enum, CUstreamCaptureMode_enum};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::{Arc, Mutex};

/// Bytes of device memory that are left free for the driver and for other programs.
pub const MARGIN: u64 = 512 << 20;

/// PTX of all kernels: the first for devices without tensor cores for bf16, the second for devices with them. Built by
/// `scripts/ptx.sh`.
const PTX: [&str; 2] = [include_str!("kernels/compute_75.ptx"), include_str!("kernels/compute_80.ptx")];

/// Bytes of dynamic shared memory that a kernel may use unless its limit is raised.
pub const USUAL_SHARED: u32 = 48 << 10;

/// A device with its stream and kernels.
pub struct Context {
    /// Properties of the device.
    pub info: DeviceInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    module: sys::CUmodule,
    /// Kernels by name, each with the bytes of dynamic shared memory that its launches may use.
    functions: Mutex<HashMap<String, (sys::CUfunction, u32)>>,
}

/// Dimensions of a launch: blocks, threads per block, and dynamic shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Number of blocks along x, y and z.
    pub grid: [u32; 3],
    /// Number of threads per block.
    pub block: u32,
    /// Bytes of dynamic shared memory per block.
    pub shared: u32,
}

// SAFETY: driver handles may be used from any thread; the context is made current where work begins.
unsafe impl Send for Context {}
// SAFETY: driver handles may be used from any thread, and the driver locks the state that calls share.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({:?})", self.info)
    }
}

impl Context {
    /// Opens a device and loads the kernels.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn open(info: DeviceInfo) -> Result<Arc<Context>> {
        let ptx = CString::new(PTX[usize::from(info.has_tensor_cores())]).expect("text without NUL");
        let opening = |e| error("opening the device", e);
        let device = result::device::get(info.ordinal as i32).map_err(opening)?;
        // SAFETY: the device exists; `drop` releases everything that is created here, in an order that keeps
        // handles valid.
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(opening)?;
            let (stream, module) = (std::ptr::null_mut(), std::ptr::null_mut());
            let mut new = Context { info, device, context, stream, module, functions: Mutex::default() };
            new.enter()?;
            new.stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(opening)?;
            new.module = result::module::load_data(ptx.as_ptr().cast()).map_err(|e| error("loading kernels", e))?;
            Ok(Arc::new(new))
        }
    }

    /// Makes this device the current one for driver calls of this thread.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained until `drop`.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| error("entering the context", e))
    }

    /// Returns the kernel of this name, ready for a launch with `shared` bytes of dynamic shared memory.
    fn function(&self, name: &str, shared: u32) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(|e| e.into_inner());
        let known = functions.get(name).copied();
        if let Some((function, limit)) = known
            && shared <= limit
        {
            return Ok(function);
        }
        let doing = |e| error(&format!("loading kernel {name}"), e);
        let function = match known {
            Some((function, _)) => function,
            None => {
                let name = CString::new(name).map_err(|_| Error::engine("found a kernel name with a NUL byte"))?;
                // SAFETY: the module is loaded.
                unsafe { result::module::get_function(self.module, name) }.map_err(doing)?
            }
        };
        if shared > USUAL_SHARED {
            let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was found in a module that stays loaded.
            unsafe { result::function::set_function_attribute(function, attribute, shared as i32) }.map_err(doing)?;
        }
        functions.insert(name.to_string(), (function, shared.max(USUAL_SHARED)));
        Ok(function)
    }

    /// Starts the kernel of this name, or records the launch while a graph is captured.
    ///
    /// # Safety
    /// - `args` is the struct that this kernel takes.
    /// - Memory that it points to belongs to this context, is large enough for the launch, and lives until the work
    ///   is done, or as long as the graph.
    ///
    /// # Errors
    /// The device has no such kernel, it cannot provide the shared memory, or the driver reports an error.
    pub unsafe fn launch<A: Copy>(&self, name: &str, launch: Launch, args: &A) -> Result<()> {
        let function = self.function(name, launch.shared)?;
        let [x, y, z] = launch.grid;
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: guaranteed by the caller; the driver copies the arguments before it returns.
        unsafe {
            result::launch_kernel(function, (x, y, z), (launch.block, 1, 1), launch.shared, self.stream, &mut params)
        }
        .map_err(|e| error("starting a kernel", e).tensor(name))
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// Some of the work failed.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives as long as the context.
        unsafe { result::stream::synchronize(self.stream) }.map_err(|e| error("computing", e))
    }

    /// Returns the free and the total bytes of device memory.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.enter()?;
        let (free, total) = result::mem_get_info().map_err(|e| error("querying free memory", e))?;
        Ok((free as u64, total as u64))
    }

    /// Allocates `len` bytes of device memory with arbitrary contents.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub fn alloc(self: &Arc<Context>, len: usize) -> Result<Buffer> {
        // The driver refuses zero bytes.
        // SAFETY: nothing reads the memory before it is written; `Buffer` frees it.
        let address = unsafe { result::malloc_sync(len.max(1)) }
            .map_err(|e| error(&format!("allocating {len} bytes of device memory"), e))?;
        Ok(Buffer { context: self.clone(), address, len })
    }

    /// Allocates `len` bytes of zeroed host memory that the device reads and writes directly.
    ///
    /// # Errors
    /// There is not enough host memory.
    pub fn alloc_pinned(self: &Arc<Context>, len: usize) -> Result<Pinned> {
        let len = len.max(1);
        // SAFETY: the memory is zeroed before it is read; `Pinned` frees it.
        let start = unsafe {
            let start = result::malloc_host(len, 0)
                .map_err(|e| error(&format!("allocating {len} bytes of pinned memory"), e))?
                .cast::<u8>();
            start.write_bytes(0, len);
            start
        };
        Ok(Pinned { context: self.clone(), start, len })
    }

    /// Records the launches of `work` as a graph instead of running them.
    ///
    /// # Errors
    /// `work` fails, or does something that cannot be recorded.
    pub fn capture(self: &Arc<Context>, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let doing = |e| error("recording a graph", e);
        let mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; `drop` destroys the recorded graph.
        unsafe {
            result::stream::begin_capture(self.stream, mode).map_err(doing)?;
            let done = work();
            let graph = result::stream::end_capture(self.stream).map_err(doing);
            done?;
            let graph = graph?;
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags_enum(0)).map_err(doing);
            let _ = result::graph::destroy(graph);
            Ok(Graph { context: self.clone(), exec: exec? })
        }
    }

    /// Records an event at the current end of the stream.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn mark(self: &Arc<Context>) -> Result<Mark> {
        let doing = |e| error("marking a time", e);
        let event = result::event::create(CUevent_flags_enum::CU_EVENT_DEFAULT).map_err(doing)?;
        let mark = Mark { context: self.clone(), event };
        // SAFETY: the event and the stream live.
        unsafe { result::event::record(event, self.stream) }.map_err(doing)?;
        Ok(mark)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nothing else uses these handles now, because buffers and graphs keep the context alive.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            if !self.module.is_null() {
                let _ = result::module::unload(self.module);
            }
            if !self.stream.is_null() {
                let _ = result::stream::destroy(self.stream);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// An allocation of device memory.
#[derive(Debug)]
pub struct Buffer {
    context: Arc<Context>,
    address: CUdeviceptr,
    len: usize,
}

impl Buffer {
    /// Returns the device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Starts copying the first `len` bytes of pinned memory to byte `offset`, in stream order. The pinned bytes
    /// must not change before the copy is done.
    ///
    /// # Errors
    /// The driver reports an error.
    ///
    /// # Panics
    /// The range exceeds one of the two memories.
    pub fn copy_from(&self, offset: usize, from: &Pinned, len: usize) -> Result<()> {
        assert!(len <= from.len && offset <= self.len && len <= self.len - offset, "a copy beyond a buffer");
        let address = self.address + offset as u64;
        // SAFETY: both ranges were checked; the owner of the pinned memory waits before it is written or freed
        // (`Pinned`).
        unsafe { result::memcpy_htod_async(address, &from.bytes()[..len], self.context.stream) }
            .map_err(|e| error("copying to the device", e))
    }

    /// Starts copying `len` bytes from byte `offset` to byte `at` of pinned memory, in stream order.
    ///
    /// # Errors
    /// The driver reports an error.
    ///
    /// # Panics
    /// The range exceeds one of the two memories.
    pub fn copy_to(&self, to: &mut Pinned, at: usize, offset: usize, len: usize) -> Result<()> {
        assert!(offset <= self.len && len <= self.len - offset, "a copy beyond a buffer");
        let (address, stream) = (self.address + offset as u64, self.context.stream);
        // SAFETY: both ranges were checked; the caller waits before the bytes are read.
        unsafe { result::memcpy_dtoh_async(&mut to.bytes_mut()[at..at + len], address, stream) }
            .map_err(|e| error("copying from the device", e))
    }

    /// Starts copying another buffer of the same length, in stream order.
    ///
    /// # Errors
    /// The driver reports an error.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn copy_from_device(&self, from: &Buffer) -> Result<()> {
        assert_eq!(self.len, from.len, "buffers of one length");
        // SAFETY: both buffers have this length.
        unsafe { result::memcpy_dtod_async(self.address, from.address, self.len, self.context.stream) }
            .map_err(|e| error("copying on the device", e))
    }

    /// Sets every byte to `value`, in stream order.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn fill(&self, value: u8) -> Result<()> {
        // SAFETY: the range is the whole buffer.
        unsafe { result::memset_d8_async(self.address, value, self.len, self.context.stream) }
            .map_err(|e| error("filling memory", e))
    }

    /// Copies `bytes` to the start of the buffer and waits until the copy is done; meant for small data.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut pinned = self.context.alloc_pinned(bytes.len())?;
        pinned.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        self.copy_from(0, &pinned, bytes.len())?;
        self.context.synchronize()
    }

    /// Waits until all work is done and returns the contents.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn read(&self) -> Result<Vec<u8>> {
        let mut pinned = self.context.alloc_pinned(self.len)?;
        self.copy_to(&mut pinned, 0, 0, self.len)?;
        self.context.synchronize()?;
        Ok(pinned.bytes()[..self.len].to_vec())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: this context allocated the memory, and it is freed once. The driver waits for work that uses it.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Page-locked host memory that the device copies from and to. Copies run asynchronously, so the memory is written
/// and read only after [`Context::synchronize`] or [`Mark::wait`].
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    len: usize,
}

// SAFETY: the memory has a single owner.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read the memory.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Returns the memory.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory was allocated and zeroed with this length.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// Returns the memory for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the memory was allocated and zeroed with this length, and it is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // A copy may still be running.
        let _ = self.context.synchronize();
        // SAFETY: this context allocated the memory, and it is freed once.
        let _ = unsafe { result::free_host(self.start.cast()) };
    }
}

/// Graph of launches that were recorded and start together.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    exec: sys::CUgraphExec,
}

// SAFETY: the handle has a single owner.
unsafe impl Send for Graph {}
// SAFETY: shared references do not use the handle; launching needs `&mut`.
unsafe impl Sync for Graph {}

impl Graph {
    /// Starts all launches of the graph.
    ///
    /// # Safety
    /// The memory that the launches point to still lives.
    ///
    /// # Errors
    /// The driver reports an error.
    pub unsafe fn launch(&mut self) -> Result<()> {
        // SAFETY: the graph and its stream live; the caller guarantees the rest.
        unsafe { result::graph::launch(self.exec, self.context.stream) }.map_err(|e| error("starting a graph", e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: the graph was created once and is destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}

/// An event: a point in the order of the stream.
#[derive(Debug)]
pub struct Mark {
    context: Arc<Context>,
    event: sys::CUevent,
}

impl Mark {
    /// Waits until the work before the event is done.
    ///
    /// # Errors
    /// Some of the work failed.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.event) }.map_err(|e| error("computing", e))
    }

    /// Returns the seconds from an earlier event to this one, after waiting for both.
    ///
    /// # Errors
    /// Some of the work between them failed.
    pub fn seconds_since(&self, earlier: &Mark) -> Result<f64> {
        let doing = |e| error("measuring time", e);
        // SAFETY: both events live and were recorded in the stream of this context.
        unsafe {
            result::event::synchronize(self.event).map_err(doing)?;
            let milliseconds = result::event::elapsed(earlier.event, self.event).map_err(doing)?;
            Ok(f64::from(milliseconds) / 1e3)
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: the event was created once and is destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}
