extern "C" __global__ void __launch_bounds__(256) k0_kernel(ushort* __restrict__ in0_ptr, ushort* __restrict__ in1_ptr, ushort* __restrict__ out0_ptr, int n0);
extern "C" __global__ void __launch_bounds__(256) k0_kernel(ushort* __restrict__ in0_ptr, ushort* __restrict__ in1_ptr, ushort* __restrict__ out0_ptr, int n0) {
  if (((int)threadIdx.x) < ((n0 * 75) - (((int)blockIdx.x) * 256))) {
    int row1 = (((((int)blockIdx.x) * 256) + ((int)threadIdx.x)) / 75);
    int position2 = ((((((int)blockIdx.x) * 256) + ((int)threadIdx.x)) % 75) * 4);
    int base3 = (row1 * 300);
    int base4 = 0;
    int at1 = (base3 + position2);
    int whole2 = (at1 >> 2);
    alignas(64) ushort x_ptr[4];
    *(ushort4*)(x_ptr + 0) = *(ushort4*)(in0_ptr + (whole2 * 4));
    int at3 = (base4 + position2);
    int whole4 = (at3 >> 2);
    alignas(64) ushort x_ptr_1[4];
    *(ushort4*)(x_ptr_1 + 0) = *(ushort4*)(in1_ptr + (whole4 * 4));
    alignas(64) ushort y_ptr[4];
    int at5 = ((row1 * 300) + position2);
    int whole6 = (at5 >> 2);
    #pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      alignas(64) float v1_ptr[1];
      v1_ptr[0] = bridge_from_bfloat16(x_ptr[lane]);
      alignas(64) float v2_ptr[1];
      v2_ptr[0] = bridge_from_bfloat16(x_ptr_1[lane]);
      alignas(64) float v3_ptr[1];
      v3_ptr[0] = (v1_ptr[0] + v2_ptr[0]);
      alignas(64) float v4_ptr[1];
      v4_ptr[0] = bridge_from_bfloat16(bridge_to_bfloat16(v3_ptr[0]));
      y_ptr[lane] = bridge_to_bfloat16(v4_ptr[0]);
    }
    *(ushort4*)(out0_ptr + (whole6 * 4)) = *(ushort4*)(y_ptr + 0);
  }
}
