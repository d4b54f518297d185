//! A device in use: its stream, the kernels loaded into it, its memory, and recorded graphs of launches.
//!
//! All work of a context goes through one stream, in order. Memory is freed when its last user is dropped; the driver
//! waits for work that still uses it.
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

/// PTX of all kernels, for devices without and with tensor cores for bf16. `scripts/ptx.sh` makes it.
const PTX: [&str; 2] = [include_str!("kernels/compute_75.ptx"), include_str!("kernels/compute_80.ptx")];

/// Dynamic shared memory that a kernel may use unless its attribute is raised.
const USUAL_SHARED: u32 = 48 << 10;

/// A device with its stream and kernels.
pub struct Context {
    /// What the device is.
    pub info: DeviceInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    module: sys::CUmodule,
    /// With the dynamic shared memory that launches of each may have.
    functions: Mutex<HashMap<String, (sys::CUfunction, u32)>>,
}

/// How many blocks of how many threads, and bytes of dynamic shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: u32,
    /// Bytes.
    pub shared: u32,
}

// SAFETY: the driver's handles may be used from any thread; the context is made current where work begins.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what calls share.
unsafe impl Sync for Context {}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({:?})", self.info)
    }
}

impl Context {
    /// Takes a device into use and loads the kernels.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn open(info: DeviceInfo) -> Result<Arc<Context>> {
        let ptx = CString::new(PTX[usize::from(info.has_tensor_cores())]).expect("text without NUL");
        let opening = |e| error("taking the device into use", e);
        let device = result::device::get(info.ordinal as i32).map_err(opening)?;
        // SAFETY: the device exists; whatever is made here is taken back by `drop`, in an order that keeps handles valid.
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

    /// Makes this thread's calls go to this device.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained until `drop`.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| error("entering the context", e))
    }

    /// The kernel of this name, for a launch with so much dynamic shared memory.
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
                let name = CString::new(name).map_err(|_| Error::engine("a kernel's name with a NUL"))?;
                // SAFETY: the module is loaded.
                unsafe { result::module::get_function(self.module, name) }.map_err(doing)?
            }
        };
        if shared > USUAL_SHARED {
            let attribute = CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was found in a module that stays.
            unsafe { result::function::set_function_attribute(function, attribute, shared as i32) }.map_err(doing)?;
        }
        functions.insert(name.to_string(), (function, shared.max(USUAL_SHARED)));
        Ok(function)
    }

    /// Starts the kernel of this name, or records it while a graph is captured.
    ///
    /// # Safety
    /// - `args` is the struct that this kernel takes.
    /// - Memory that it points to is of this context, large enough for what the launch does with it, and lives until the work is
    ///   done, or as long as the graph.
    ///
    /// # Errors
    /// There is no such kernel for this device, it cannot have the shared memory, or the driver refuses.
    pub unsafe fn launch<A: Copy>(&self, name: &str, launch: Launch, args: &A) -> Result<()> {
        let function = self.function(name, launch.shared)?;
        let [x, y, z] = launch.grid;
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        unsafe {
            result::launch_kernel(function, (x, y, z), (launch.block, 1, 1), launch.shared, self.stream, &mut params)
        }
        .map_err(|e| error("starting a kernel", e).tensor(name))
    }

    /// Waits until all work is done.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives as long as the context.
        unsafe { result::stream::synchronize(self.stream) }.map_err(|e| error("computing", e))
    }

    /// Free and total bytes of the device.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn memory(&self) -> Result<(u64, u64)> {
        self.enter()?;
        let (free, total) = result::mem_get_info().map_err(|e| error("asking for free memory", e))?;
        Ok((free as u64, total as u64))
    }

    /// `len` bytes of device memory, whose contents are arbitrary.
    ///
    /// # Errors
    /// There is no room.
    pub fn alloc(self: &Arc<Context>, len: usize) -> Result<Buffer> {
        // The driver refuses zero bytes.
        // SAFETY: nothing reads the memory before it is written; `Buffer` frees it.
        let address = unsafe { result::malloc_sync(len.max(1)) }
            .map_err(|e| error(&format!("allocating {len} bytes of device memory"), e))?;
        Ok(Buffer { context: self.clone(), address, len })
    }

    /// `len` bytes of host memory that the device reads and writes by itself, zeroed.
    ///
    /// # Errors
    /// There is no room.
    pub fn alloc_pinned(self: &Arc<Context>, len: usize) -> Result<Pinned> {
        let len = len.max(1);
        // SAFETY: zeroed before anybody reads it; `Pinned` frees it.
        let start = unsafe {
            let start = result::malloc_host(len, 0)
                .map_err(|e| error(&format!("allocating {len} bytes of pinned memory"), e))?
                .cast::<u8>();
            start.write_bytes(0, len);
            start
        };
        Ok(Pinned { context: self.clone(), start, len })
    }

    /// Records what `work` starts instead of running it.
    ///
    /// # Errors
    /// `work` fails, or does something that cannot be recorded.
    pub fn capture(self: &Arc<Context>, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let doing = |e| error("recording a graph", e);
        let mode = CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; a recorded graph is taken apart by `drop`.
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

    /// A mark in the stream.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn mark(self: &Arc<Context>) -> Result<Mark> {
        let doing = |e| error("marking a time", e);
        let event = result::event::create(CUevent_flags_enum::CU_EVENT_DEFAULT).map_err(doing)?;
        let mark = Mark { context: self.clone(), event };
        // SAFETY: event and stream live.
        unsafe { result::event::record(event, self.stream) }.map_err(doing)?;
        Ok(mark)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nothing else has these handles now: buffers and graphs hold the context.
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

/// Device memory.
#[derive(Debug)]
pub struct Buffer {
    context: Arc<Context>,
    address: CUdeviceptr,
    len: usize,
}

impl Buffer {
    /// Where it starts, for kernels.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Copies the first `len` bytes of pinned memory to `offset`, in the order of the stream: they may not change
    /// before the copy is done.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Panics
    /// They do not fit.
    pub fn copy_from(&self, offset: usize, from: &Pinned, len: usize) -> Result<()> {
        assert!(len <= from.len && offset <= self.len && len <= self.len - offset, "a copy beyond a buffer");
        let address = self.address + offset as u64;
        // SAFETY: both ranges were checked; whoever holds the pinned memory waits before it is written or freed (`Pinned`).
        unsafe { result::memcpy_htod_async(address, &from.bytes()[..len], self.context.stream) }
            .map_err(|e| error("copying to the device", e))
    }

    /// Copies `len` bytes from `offset` on to byte `at` of pinned memory, in the order of the stream.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Panics
    /// There are fewer.
    pub fn copy_to(&self, to: &mut Pinned, at: usize, offset: usize, len: usize) -> Result<()> {
        assert!(offset <= self.len && len <= self.len - offset, "a copy beyond a buffer");
        let (address, stream) = (self.address + offset as u64, self.context.stream);
        // SAFETY: both ranges were checked; the caller waits before the bytes are read.
        unsafe { result::memcpy_dtoh_async(&mut to.bytes_mut()[at..at + len], address, stream) }
            .map_err(|e| error("copying from the device", e))
    }

    /// Copies another buffer of the same length.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn copy_from_device(&self, from: &Buffer) -> Result<()> {
        assert_eq!(self.len, from.len, "buffers of one length");
        // SAFETY: both are this long.
        unsafe { result::memcpy_dtod_async(self.address, from.address, self.len, self.context.stream) }
            .map_err(|e| error("copying on the device", e))
    }

    /// Sets every byte to `value`.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn fill(&self, value: u8) -> Result<()> {
        // SAFETY: the range is this buffer.
        unsafe { result::memset_d8_async(self.address, value, self.len, self.context.stream) }
            .map_err(|e| error("filling memory", e))
    }

    /// Fills it with `bytes` and waits; for small things.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut pinned = self.context.alloc_pinned(bytes.len())?;
        pinned.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        self.copy_from(0, &pinned, bytes.len())?;
        self.context.synchronize()
    }

    /// What it holds, once all work is done.
    ///
    /// # Errors
    /// The driver refuses.
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
        // SAFETY: allocated by this context, freed once. The driver waits for work that uses it.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Host memory that the device copies from and to. Copies run behind the caller's back, so it is written and read only
/// after [`Context::synchronize`].
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    len: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The memory.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and zeroed with this length.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    /// The memory, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusively borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // A copy may still be under way.
        let _ = self.context.synchronize();
        // SAFETY: allocated by this context, freed once.
        let _ = unsafe { result::free_host(self.start.cast()) };
    }
}

/// Launches that were recorded and start together.
#[derive(Debug)]
pub struct Graph {
    context: Arc<Context>,
    exec: sys::CUgraphExec,
}

// SAFETY: a handle that one owner uses.
unsafe impl Send for Graph {}
// SAFETY: as above; launching needs `&mut`.
unsafe impl Sync for Graph {}

impl Graph {
    /// Starts all of it.
    ///
    /// # Safety
    /// What the launches point to still lives.
    ///
    /// # Errors
    /// The driver refuses.
    pub unsafe fn launch(&mut self) -> Result<()> {
        // SAFETY: the graph and its stream live; the caller's promise covers the rest.
        unsafe { result::graph::launch(self.exec, self.context.stream) }.map_err(|e| error("starting a graph", e))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.enter();
        // SAFETY: made once, destroyed once.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}

/// A point in the order of the stream.
#[derive(Debug)]
pub struct Mark {
    context: Arc<Context>,
    event: sys::CUevent,
}

impl Mark {
    /// Waits until the work before it is done.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event lives.
        unsafe { result::event::synchronize(self.event) }.map_err(|e| error("computing", e))
    }

    /// Seconds from an earlier mark to this one; waits for both.
    ///
    /// # Errors
    /// Work between them failed.
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
        // SAFETY: created once, destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}
