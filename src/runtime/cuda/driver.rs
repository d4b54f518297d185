//! Loads the NVIDIA driver at run time. Nothing links against it, and every symbol is looked up before its first
//! use, because `cudarc` panics if one is missing.

use crate::error::{Cause, Error, Result};
use crate::runtime::device::DeviceInfo;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUresult};

/// Driver symbols that the runtime calls. All are older than CUDA 12.0, and newer drivers keep them.
const SYMBOLS: &str = "
    cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute cuDeviceTotalMem_v2
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxSetCurrent cuGetErrorName cuGetErrorString
    cuMemGetInfo_v2 cuMemAlloc_v2 cuMemFree_v2 cuMemHostAlloc cuMemFreeHost cuMemcpyHtoDAsync_v2
    cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemsetD8Async
    cuModuleLoadData cuModuleUnload cuModuleGetFunction cuFuncSetAttribute cuLaunchKernel
    cuStreamCreate cuStreamDestroy_v2 cuStreamSynchronize cuStreamBeginCapture_v2 cuStreamEndCapture
    cuGraphInstantiateWithFlags cuGraphLaunch cuGraphExecDestroy cuGraphDestroy
    cuEventCreate cuEventRecord cuEventSynchronize cuEventElapsedTime cuEventDestroy_v2
";

/// Oldest supported driver version: CUDA 12.0, the first that takes PTX 8.0.
const OLDEST_DRIVER: i32 = 12_000;
/// Lowest compute capability that kernels exist for (Turing).
const LEAST_CAPABILITY: (u32, u32) = (7, 5);

/// A driver that was found and can be used.
#[derive(Debug, Clone, Copy)]
pub struct Driver {
    /// CUDA version of the driver; 12080 is CUDA 12.8.
    pub version: i32,
    devices: usize,
}

impl Driver {
    /// Loads the driver and counts its devices.
    ///
    /// # Errors
    /// There is no driver, it is too old, it does not start, or it has no device.
    #[allow(unsafe_code)]
    pub fn open() -> Result<Driver> {
        // SAFETY: tries to load a system library by its name.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::engine("found no NVIDIA driver (libcuda) on this machine")
                .help("install the driver of the graphics card, or use --device cpu"));
        }
        // SAFETY: the library was just found, so this does not panic; symbols are looked up, not called.
        let missing = unsafe {
            let library = sys::culib();
            SYMBOLS.split_whitespace().find(|name| library.get::<unsafe extern "C" fn()>(name.as_bytes()).is_err())
        };
        if let Some(name) = missing {
            return Err(Error::engine(format!("the NVIDIA driver lacks `{name}`")).help(UPDATE));
        }
        result::init().map_err(|e| match e.0 {
            CUresult::CUDA_ERROR_NO_DEVICE => no_device(),
            CUresult::CUDA_ERROR_STUB_LIBRARY => {
                Error::engine("found the libcuda stub of a CUDA toolkit, expected a driver").help(
                    "remove the toolkit's directory `stubs` from LD_LIBRARY_PATH, install the driver of the graphics \
                     card if there is none, or use --device cpu",
                )
            }
            _ => error("starting the driver", e),
        })?;
        let mut version = 0;
        // SAFETY: the driver writes one number.
        unsafe { sys::cuDriverGetVersion(&mut version) }
            .result()
            .map_err(|e| error("querying the driver version", e))?;
        if version < OLDEST_DRIVER {
            let found = format!("found an NVIDIA driver of CUDA {}, expected at least 12.0", dotted(version));
            return Err(Error::engine(found).help(UPDATE));
        }
        let devices = result::device::get_count().map_err(|e| error("counting devices", e))?;
        match usize::try_from(devices) {
            Ok(devices) if devices > 0 => Ok(Driver { version, devices }),
            _ => Err(no_device()),
        }
    }

    /// Returns the CUDA version of the driver, such as `12.8`.
    pub fn cuda_version(&self) -> String {
        dotted(self.version)
    }

    /// Returns the number of devices, at least one.
    pub fn devices(&self) -> usize {
        self.devices
    }

    /// Describes a device.
    ///
    /// # Errors
    /// There is no device of this number, or it is too old.
    pub fn device(&self, ordinal: usize) -> Result<DeviceInfo> {
        if ordinal >= self.devices {
            let found = format!("found no CUDA device {ordinal}, expected a number from 0 to {}", self.devices - 1);
            return Err(Error::engine(found).help("`iec devices` lists them"));
        }
        let info = self.ask(ordinal).map_err(|e| error("querying the device", e))?;
        if info.capability < LEAST_CAPABILITY {
            let (major, minor) = info.capability;
            let found = format!("CUDA device {ordinal}, {}, has compute capability {major}.{minor}", info.name);
            return Err(Error::engine(format!("{found}, expected at least 7.5")).help("use --device cpu"));
        }
        Ok(info)
    }

    #[allow(unsafe_code)]
    fn ask(&self, ordinal: usize) -> std::result::Result<DeviceInfo, DriverError> {
        let device = result::device::get(ordinal as i32)?;
        // SAFETY: the driver has just returned this device.
        let attribute = |what| unsafe { result::device::get_attribute(device, what) }.map(|v| v.max(0) as u32);
        Ok(DeviceInfo {
            kind: "cuda",
            ordinal,
            driver: self.cuda_version(),
            name: result::device::get_name(device)?,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1),
            // SAFETY: the driver has just returned this device.
            memory: unsafe { result::device::total_mem(device) }? as u64,
            shared: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        })
    }
}

const UPDATE: &str = "update the NVIDIA driver (version 525 or newer), or use --device cpu";

fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn no_device() -> Error {
    Error::engine("the NVIDIA driver finds no device")
        .help("check with `nvidia-smi` and CUDA_VISIBLE_DEVICES that this process may use a GPU, or use --device cpu")
}

/// Converts an error of the driver while `doing` something.
pub(super) fn error(doing: &str, e: DriverError) -> Error {
    let text = |text: std::result::Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| format!("error {}", e.0 as i32), |text| text.to_string_lossy().into_owned())
    };
    let said = format!("CUDA, {doing}: {} ({})", text(e.error_string()), text(e.error_name()));
    match e.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Error::new(Cause::OutOfMemory(said))
            .help("leave layers to the CPU (--gpu-layers N), or use a shorter context (--ctx) or --kv bf16"),
        _ => Error::engine(said).help("use --device cpu; `nvidia-smi` shows whether the driver and the GPU work"),
    }
}
