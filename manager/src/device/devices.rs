//! Every device of a Manager behind one interface: host memory, and GPUs where there are any.

use super::{CopyCommand, CopyEnd, CudaDevice, Device, DeviceRegion, HostDevice};
use crate::core::RegionKind;

/// Sends each command to the device that reaches its region. Not `Sync`: the reactor owns it.
pub struct Devices {
    host: HostDevice,
    cuda: Option<CudaDevice>,
    cuda_first: bool,
}

impl Devices {
    /// `cuda` is `None` where there is no driver.
    pub fn new(host: HostDevice, cuda: Option<CudaDevice>) -> Self {
        Self { host, cuda, cuda_first: false }
    }
}

impl Device for Devices {
    fn submit(&mut self, command: CopyCommand) -> Result<(), CopyCommand> {
        match (command.region.kind(), &mut self.cuda) {
            (RegionKind::Gpu, Some(cuda)) => cuda.submit(command),
            // The host device tells what is wrong with a region that it cannot reach.
            _ => self.host.submit(command),
        }
    }

    fn expect(&mut self, region: &DeviceRegion) {
        if let (RegionKind::Gpu, Some(cuda)) = (region.kind(), &mut self.cuda) {
            cuda.expect(region);
        }
    }

    fn poll(&mut self) -> Option<CopyEnd> {
        let Some(cuda) = &mut self.cuda else { return self.host.poll() };
        // In turn: neither starves the other.
        self.cuda_first = !self.cuda_first;
        if self.cuda_first {
            cuda.poll().or_else(|| self.host.poll())
        } else {
            self.host.poll().or_else(|| cuda.poll())
        }
    }

    fn outstanding(&self) -> usize {
        self.host.outstanding() + self.cuda.as_ref().map_or(0, CudaDevice::outstanding)
    }

    fn stop(&mut self) {
        if let Some(cuda) = &mut self.cuda {
            cuda.stop();
        }
        self.host.stop();
    }
}
